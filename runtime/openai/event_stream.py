"""Streams of server-sent events."""

import asyncio
import contextlib
import json
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from .api_errors import ErrorForm, error_answer, openai_error

if TYPE_CHECKING:
    from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or nginx would hold tokens back
}


def as_json(data: Any) -> str:
    """Returns data as JSON, as short as it can be."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def quoted(text: str) -> str:
    """Returns a text as JSON, for chunks that are put together of pieces: most of a chunk is the same in each."""
    return encode_basestring(text)


class EventStream:
    """The answer to one request. Nothing is sent before the first event, so that an early error has its own status.

    Args:
      request: The request.
      headers: Headers of the answer.
      error_form: The form of an error in the stream.
    """

    def __init__(self, request: "web.Request", headers: dict[str, str], error_form: ErrorForm = openai_error):
        from aiohttp import web

        self._request, self._error_form = request, error_form
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self.has_begun = False

    async def send(self, data: Any, event: str = "") -> None:
        """Sends an event with data, which becomes JSON unless it is text, and its name, if it has one."""
        text = data if isinstance(data, str) else as_json(data)
        await self._write(f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n")

    async def finish(self, last: str = "[DONE]") -> "web.StreamResponse":
        """Ends the stream, with a last event unless that is empty."""
        if last:
            await self._write(f"data: {last}\n\n")
        with contextlib.suppress(ConnectionError):
            await self._response.write_eof()
        return self._response

    async def fail(self, error: Exception, last: str = "[DONE]") -> "web.StreamResponse":
        """Ends the stream with an event that says what went wrong. Raises the error if nothing has been sent yet."""
        if not self.has_begun:
            raise error
        await self.send(self._error_form(error_answer(error)), "error")
        return await self.finish(last)

    async def _write(self, text: str) -> None:
        """Sends a text. A caller that has left ends the request, as if that were cancelled."""
        try:
            if not self.has_begun:
                self.has_begun = True
                await self._response.prepare(self._request)
            await self._response.write(text.encode())
        except ConnectionError as gone:
            raise asyncio.CancelledError from gone
