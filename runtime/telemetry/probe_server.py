"""The HTTP port, for probes and Prometheus: GET /metrics, /livez and /readyz. No encryption, no tokens, no state.

/livez is 200 while the process may be left alone (a dead engine makes it 503), /readyz while requests are taken. On the
event loop's own thread: if that hangs, so do the probes, which is what they are there to find out.
"""

import asyncio
import contextlib
from collections.abc import Callable

from ..api.errors import ConfigError

_MAX_REQUEST_BYTES = 8_192
_TIMEOUT_SECONDS = 5.0
_MAX_CONNECTIONS = 64

# What a path answers: status and body.
Answer = Callable[[], tuple[int, str]]
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpPort:
    """Answers GET on a fixed set of paths, one request a connection."""

    def __init__(self, answers: dict[str, Answer]):
        self._answers = answers
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}  # who serves it; the oldest first
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Binds and serves. 0 takes a free port.

        Raises:
          ConfigError: the address cannot be bound.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot bind {host}:{port} for HTTP: {error}. Choose another --http-port.") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Takes no more connections and ends the open ones."""
        if self._server is not None:
            self._server.close()
        serving = [task for task in self._open.values() if task is not None]
        for writer in self._open:
            writer.transport.abort()
        # Else the end of the loop cancels them, and asyncio logs a trace of each.
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:  # the oldest has had the most time to ask
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = asyncio.current_task()
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # nobody to tell
        finally:
            self._open.pop(writer, None)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in self._answers:
            status, body = 404, f"there are {', '.join(sorted(self._answers))}\n"
        elif method not in ("GET", "HEAD"):
            status, body = 405, "only GET\n"
        else:
            status, body = self._answers[path]()
        data = body.encode()
        lines = (
            f"HTTP/1.1 {status} {_REASONS[status]}",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(data)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else data)
