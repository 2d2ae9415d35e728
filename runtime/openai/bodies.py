"""Reads and parses the bodies of requests, within bounds of bytes, time and memory.

A body is refused before it is read if its length says that it is too large, and otherwise once it is. Only bodies of
some size count against what a tenant, and all tenants together, may have in memory, so that slow or large ones do not
keep others from sending theirs. Those that take long are parsed in a thread, one at a time, tenants in turn; so is what
the routes make of them.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..api.errors import InvalidRequestError, QueueFullError, QuotaExceededError
from ..server.inference_service import MAX_MESSAGE_BYTES
from ..text.work_pool import Paced, WorkPool
from . import json_text
from .api_errors import HttpError

if TYPE_CHECKING:
    from aiohttp import web

Result = TypeVar("Result")

_SMALL_BYTES = 2**16  # not counted
_MAX_HELD_BYTES = 2**29  # of larger bodies; a tenant may have half
_BODY_SECONDS = 30.0  # for a client to send a body
_INLINE_BYTES = 2**16  # parsed on the event loop, in a millisecond
_SHARE = 0.5  # of the time, for large bodies: other threads run meanwhile, but wait half a millisecond each time
_RETRY_SECONDS = 1.0
_MIN_VALUES, _VALUES_PER_TOKEN = 2**16, 8  # of a body; a message has three values, or more


class Bodies:
    """The bodies of one port."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}  # bytes of large bodies that are read or parsed, by tenant
        self.num_held = 0
        self._pool = WorkPool("large bodies", num_threads=1, max_calls=256, max_size=2**29)
        self._paced = Paced(_SHARE)

    async def parsed(self, request: "web.Request", tenant: str, max_context: int) -> tuple[Any, "Apart"]:
        """Returns the value of a body, and what runs functions that read it.

        Raises:
          HttpError: The body is too large, or does not come in time.
          InvalidRequestError: It is not JSON.
          QuotaExceededError, QueueFullError: Too many large bodies are in progress.
        """
        _check_length(request.content_length or 0)
        counted = 0
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            await ask_for(request)
            async with asyncio.timeout(_BODY_SECONDS):
                while piece := await _next(request):
                    num_bytes += len(piece)
                    _check_length(num_bytes)
                    pieces.append(piece)
                    if num_bytes > _SMALL_BYTES:
                        self._hold(tenant, num_bytes - counted)
                        counted = num_bytes
            data = b"".join(pieces)
            del pieces
            if not json_text.takes_long(data, _INLINE_BYTES):
                return json_text.parsed(data), Apart(self._pool, self._paced, tenant)
            max_values = _MIN_VALUES + _VALUES_PER_TOKEN * max_context
            apart = Apart(self._pool, self._paced, tenant, num_bytes)
            return await apart.run(json_text.parsed_in_pieces, data, max_values), apart
        finally:
            self._hold(tenant, -counted)

    def _hold(self, tenant: str, num_bytes: int) -> None:
        held = self._held.get(tenant, 0) + num_bytes
        if num_bytes > 0:
            if held > _MAX_HELD_BYTES // 2:
                message = f"bodies of {held} bytes are being read; a tenant may send {_MAX_HELD_BYTES // 2} at a time."
                raise QuotaExceededError(f"{message} Retry later.", f"tenant:{tenant}", _RETRY_SECONDS)
            if self.num_held + num_bytes > _MAX_HELD_BYTES:
                message = f"bodies of {self.num_held} bytes are being read; this server reads {_MAX_HELD_BYTES}."
                raise QueueFullError(f"{message} Retry later.", _RETRY_SECONDS)
        self.num_held += num_bytes
        self._held[tenant] = held
        if not held:
            del self._held[tenant]


class Apart:
    """Runs functions that read one body: at once, or in a thread if the body is large. Without a pool, all at once."""

    def __init__(self, pool: WorkPool | None = None, paced: Paced | None = None, tenant: str = "", num_bytes: int = 0):
        self._pool, self._paced, self._tenant, self._num_bytes = pool, paced, tenant, num_bytes

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Returns the result of a function. Raises what it raises, QuotaExceededError and QueueFullError."""
        return await self.run_long(function, *arguments) if self._num_bytes else function(*arguments)

    async def run_long(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Does the same with a function that takes long, whatever the body is."""
        if self._pool is None or self._paced is None:
            return function(*arguments)
        return await self._pool.run(self._tenant, self._num_bytes, self._paced, function, *arguments)


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise HttpError(413, f"the body is too large; allowed are {MAX_MESSAGE_BYTES} bytes.")


async def ask_for(request: "web.Request") -> None:
    """Tells a client that asks first that it may send the body."""
    if request.headers.get("Expect", "").lower() == "100-continue" and not request.content.is_eof():
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent


async def _next(request: "web.Request") -> bytes:
    """Returns the next bytes of a body, uncompressed; none at its end."""
    from aiohttp import web
    from aiohttp.http_exceptions import BadHttpMessage

    try:
        return await request.content.readany()
    except (web.RequestPayloadError, BadHttpMessage) as error:
        error.__traceback__ = None  # the request's stream holds it, which would be a cycle with what has been read
        raise InvalidRequestError("body", f"cannot be read: {error}."[:200]) from None
