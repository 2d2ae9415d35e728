"""Reads streams of OpenAI's API as cheaply as they can be read, since the client is not what is measured."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

_END = b"\n\n"
_CHOICE, _USAGE = b'"choices":[{', b'"choices":[]'  # in an event with text, and in that with the usage


def session() -> aiohttp.ClientSession:
    """Returns a session without limits, for servers of this machine."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)


async def events(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """Yields what arrives of a stream: one event or several in a row, each with the blank line that ends it.

    Raises:
      RuntimeError: The server has refused the request.
    """
    async with client.post(url, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:1000]}")
        rest = b""
        async for data in response.content.iter_any():
            data = rest + data if rest else data
            if not data.endswith(_END):
                whole, end, rest = data.rpartition(_END)
                data = whole + end
            else:
                rest = b""
            if data:
                yield data


async def num_tokens(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> AsyncIterator[int]:
    """Yields the tokens of a stream: one for each event, and at the end those that came several in an event.

    Raises:
      RuntimeError: The server has refused the request, or ended it with an error.
    """
    counted, last = 0, b""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for data in events(client, url, asked):
        if new := data.count(_CHOICE):
            counted += new
            yield new
        if _USAGE in data or b"event: error" in data:
            last = data
    found = [line for line in last.splitlines() if _USAGE in line]
    if not found:
        raise RuntimeError(f"the stream ended with {last[-1000:]!r}")
    yield json.loads(found[-1].removeprefix(b"data: "))["usage"]["completion_tokens"] - counted
