"""Measures the HTTP port as `edge_streams` measures gRPC: raw connections, since the client is not what is measured."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

_CHOICE, WORD = b'"choices":[{', b" word"  # once in each message of a stream, and once for each token
_BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": [1]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}

# Takes the messages and tokens of what has just arrived.
OnMessages = Callable[[int, int], None]


class _Reader(asyncio.Protocol):
    """One stream. Its future ends with the connection."""

    def __init__(self, request: bytes, on_messages: OnMessages):
        self._request, self._on_messages = request, on_messages
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no instance of it
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if num_messages := data.count(_CHOICE):
            self._on_messages(num_messages, data.count(WORD))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def read(address: str, path: str, max_tokens: int, until: float, on_messages: OnMessages) -> bool:
    """Reads a stream until a time on the monotonic clock. Returns whether the stream ended before."""
    host, _, port = address.rpartition(":")
    body = json.dumps({**_BODIES[path], "max_tokens": max_tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    request = f"{head}\r\n\r\n".encode() + body
    _, reader = await asyncio.get_running_loop().create_connection(
        lambda: _Reader(request, on_messages), host, int(port)
    )
    await asyncio.wait([reader.ended], timeout=until - time.monotonic())
    has_ended = reader.ended.done()
    if reader.transport is not None:
        reader.transport.abort()
    return has_ended
