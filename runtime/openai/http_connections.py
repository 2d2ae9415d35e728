"""Keeps the connections of an HTTP port few and moving.

A connection costs little while it is silent, but there must not be any number of them, and one that is not served must
go before one that is. Connections are closed without waiting for clients that do not read.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

HEADER_SECONDS = 10.0  # for a new connection to send its first request, and for a TLS handshake
KEEPALIVE_SECONDS = 75.0
STALLED_SECONDS = 30.0  # for a client to take anything of what has been sent
MAX_CONNECTIONS = 4_096
_SWEEP_SECONDS = 5.0


class HttpConnections:
    """The connections of one port. All methods run on the event loop.

    Args:
      server: Makes their protocols.
    """

    def __init__(self, server: "web.Server"):
        self._server = server
        self._serving: set[Any] = set()  # protocols that wait for an answer of the server
        self._proper: set[Any] = set()  # those whose last request came from a caller who may make it
        self._silent: dict[Any, int] = {}  # those on which no request has come, and how many sweeps they have seen
        self._unread: dict[Any, tuple[int, float]] = {}  # bytes that a client has not taken, and since when
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts to close connections that do not move."""
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def stop(self) -> None:
        """Ends that."""
        if self._timer is not None:
            self._timer.cancel()

    def accept(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection.

        At the limit it takes the place of the oldest one that is not being served, of those that have sent nothing
        proper before others. If all are being served, it is closed.
        """
        open_ones = [each for each in self._server.connections if each.transport is not None]
        if len(open_ones) >= MAX_CONNECTIONS:
            idle = [each for each in open_ones if each not in self._serving]
            if not idle:
                return _Closed()
            close(min(idle, key=self._proper.__contains__))
        protocol = self._server()
        self._silent[protocol] = 0
        return _Connection(protocol, self._forget)

    def begin(self, protocol: Any) -> None:
        """Notes that a request has come."""
        self._silent.pop(protocol, None)
        self._proper.discard(protocol)

    def serve(self, protocol: Any) -> None:
        """Notes that the request is proper, and that its answer is being made."""
        self._proper.add(protocol)
        self._serving.add(protocol)

    def end(self, protocol: Any) -> None:
        """Notes that the answer has been made."""
        self._serving.discard(protocol)

    def _forget(self, protocol: Any) -> None:
        self._silent.pop(protocol, None)
        self._proper.discard(protocol)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SWEEP_SECONDS, self._sweep)
        now = loop.time()
        for protocol, num_sweeps in list(self._silent.items()):  # sweeps, because a busy loop reads between two of them
            self._silent[protocol] = num_sweeps + 1
            if num_sweeps >= HEADER_SECONDS / _SWEEP_SECONDS:
                del self._silent[protocol]
                close(protocol)
        unread = {}
        for protocol in self._server.connections:
            if protocol.transport is None or not (num_bytes := protocol.transport.get_write_buffer_size()):
                continue
            before, since = self._unread.get(protocol, (0, now))
            unread[protocol] = (num_bytes, since if before == num_bytes else now)
            if now - unread[protocol][1] >= STALLED_SECONDS:
                close(protocol)
        self._unread = unread
        self._proper.intersection_update(self._server.connections)


class _Connection(asyncio.Protocol):
    """Stands before the protocol of a connection, and drops what follows something that is no request.

    The loop hands over up to 32 pieces of 256 KiB before the protocol can answer and close. It would queue an error for
    each of them, with a traceback that leads to the piece.
    """

    def __init__(self, protocol: "web.RequestHandler", forget: Callable[[Any], None]):
        self.protocol = protocol
        self._forget = forget
        self._is_spoilt = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_spoilt:
            return
        self.protocol.data_received(data)
        queued = self.protocol._messages
        error = getattr(queued[-1][0], "exc", None) if queued else None  # that of what could not be parsed
        if error is not None:
            self._is_spoilt = True
            error.__traceback__ = None

    def eof_received(self) -> None:
        self.protocol.eof_received()

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.protocol.connection_lost(error)
        self._forget(self.protocol)


class _Closed(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def close(protocol: "web.RequestHandler") -> None:
    """Closes a connection without waiting for a client that does not read."""
    if protocol.transport is not None:
        protocol.transport.abort()
