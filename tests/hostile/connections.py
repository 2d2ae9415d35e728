"""Connections that are no proper HTTP/2, or proper and of no good intent.

To add one, add an entry to `CONNECTIONS`: what is sent on how many connections, and how they end.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tests.hostile.floods import generate
from tests.waiting import WAIT_SECONDS

GENERATE = "/meshserve.v1.InferenceService/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
_MAX_WINDOW = 2**31 - 1


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Returns a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """Returns a header field without compression; both parts have less than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def headers(path: str = GENERATE, tenant: str = "attacker") -> bytes:
    """Returns the header fields of a call."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers",
        "content-type": "application/grpc", "authorization": f"Bearer {tenant}",
    }  # fmt: skip
    return b"".join(_field(name.encode(), value.encode()) for name, value in fields.items())


def beginning(window: int = 65_535) -> bytes:
    """Returns what a client sends first, with the number of bytes of each answer that it is ready to take."""
    settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
    more = frame(_WINDOW_UPDATE, payload=struct.pack(">I", _MAX_WINDOW - 65_535)) if window > 65_535 else b""
    return PREFACE + frame(_SETTINGS, payload=settings) + more


def calls(number: int, request: Message, window: int, path: str = GENERATE) -> bytes:
    """Returns complete calls on one connection."""
    data = request.SerializeToString()
    body = b"\x00" + struct.pack(">I", len(data)) + data
    return beginning(window) + b"".join(
        frame(_HEADERS, _END_HEADERS, stream, headers(path)) + frame(_DATA, _END_STREAM, stream, body)
        for stream in range(1, 2 * number, 2)
    )


def resets(number: int) -> bytes:
    """Returns calls that are each reset at once."""
    return beginning() + b"".join(
        frame(_HEADERS, _END_HEADERS, stream, headers()) + frame(_RST_STREAM, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 2 * number, 2)
    )


@dataclass(frozen=True)
class Connections:
    """What is sent on each of some connections, which then stay open and are never read.

    Attributes:
      is_reset: Whether they end at once with a reset, instead of with the attack.
      is_half_closed: Whether nothing more will be sent, which the server is told.
      piece_bytes: How much is sent at a time, round by round; None sends all at once.
    """

    data: bytes
    number: int = 50
    is_reset: bool = False
    is_half_closed: bool = False
    piece_bytes: int | None = None

    @contextlib.contextmanager
    def open(self, target: str) -> Iterator[None]:
        """Opens the connections, and closes them with the block."""
        host, port = target.split(":")
        with contextlib.ExitStack() as stack:
            sockets = []
            for _ in range(self.number):
                connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
                stack.enter_context(connection)
                sockets.append(connection)
                if self.piece_bytes is None:
                    self._send(connection, self.data)
            step = self.piece_bytes or len(self.data) or 1
            for start in range(0, len(self.data) if self.piece_bytes else 0, step):
                for connection in sockets:
                    self._send(connection, self.data[start : start + step])
                time.sleep(0.005)  # slow, not waiting for anything
            for connection in sockets:
                with contextlib.suppress(OSError):
                    if self.is_half_closed:
                        connection.shutdown(socket.SHUT_WR)
                if self.is_reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()
            yield

    @staticmethod
    def _send(connection: socket.socket, data: bytes) -> None:
        connection.settimeout(1.0)  # the server may refuse to read on, or may have closed the connection
        with contextlib.suppress(OSError):
            connection.sendall(data)


UNREAD_HEALTH = Connections(calls(5, health_pb2.HealthCheckRequest(), 0, WATCH), 5)
_UNREAD = generate(n=16, max_tokens=500, ignore_eos=True, logprobs=20)  # more than the server keeps for a reader
_ENDLESS_HEADERS = frame(_HEADERS, 0, 1, headers()) + frame(_CONTINUATION, 0, 1, _field(b"a", b"b" * 99) * 150) * 200

CONNECTIONS: Mapping[str, Connections] = {
    "silent": Connections(b"", 300),
    "silent and half closed": Connections(b"", is_half_closed=True),
    "HTTP/1.1": Connections(b"GET / HTTP/1.1\r\n\r\n"),
    "TLS": Connections(b"\x16\x03\x01" + b"\x00" * 50),
    "half a preface": Connections(PREFACE[:10], 300),
    "a preface and no settings": Connections(PREFACE, 300),
    "garbage": Connections(beginning() + b"\xff" * 100),
    "a frame that is too long": Connections(beginning() + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"),
    "headers that are none": Connections(beginning() + frame(_HEADERS, 5, 1, b"\xff\xff\xff\xff")),
    "headers that never end": Connections(beginning() + _ENDLESS_HEADERS, 10),
    "headers and no message": Connections(beginning() + frame(_HEADERS, _END_HEADERS, 1, headers()), 30),
    "half a message": Connections(
        beginning() + frame(_HEADERS, _END_HEADERS, 1, headers()) + frame(_DATA, 0, 1, b"\x00\x00\x00\x00\x50abc"), 30
    ),
    "a byte at a time": Connections(calls(1, generate(max_tokens=1), 65_535), 20, piece_bytes=8),
    "reset": Connections(beginning(), 200, is_reset=True),
    "calls that are reset with the connection": Connections(calls(8, generate(max_tokens=99), 0), 20, is_reset=True),
    "calls that are each reset": Connections(resets(2_000), 4),
    "pings": Connections(beginning() + frame(_PING, payload=b"12345678") * 5_000, 4),
    "settings": Connections(beginning() + frame(_SETTINGS) * 5_000, 4),
    "answers that may not be sent": Connections(calls(8, _UNREAD, 0), 1),
    "health that may not be sent": UNREAD_HEALTH,
    "answers that are not read": Connections(calls(8, _UNREAD, _MAX_WINDOW), 1),
}
