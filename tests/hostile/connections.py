"""Connections that are no proper HTTP/2 or HTTP, or proper and of no good intent.

To add one, add an entry to `CONNECTIONS`, or to `HTTP_CONNECTIONS` for the ports that speak HTTP: what is sent on how
many connections, and how they end.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tests.hostile.floods import generate
from tests.waiting import WAIT_SECONDS

GENERATE = "/meshserve.v1.InferenceService/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = 8  # why a stream is reset
_INITIAL_WINDOW_SIZE = 4
_MAX_WINDOW = 2**31 - 1


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Returns a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: bytes, value: bytes, kind: int = 0) -> bytes:
    """Returns a header field that is not compressed; both parts have less than 127 bytes. Kind 0x40 is remembered."""
    return bytes([kind, len(name)]) + name + bytes([len(value)]) + value


def _fields(path: str, tenant: str) -> dict[str, str]:
    return {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "a", "te": "trailers",
        "content-type": "application/grpc", "authorization": f"Bearer {tenant}",
    }  # fmt: skip


def headers(path: str = GENERATE, tenant: str = "attacker") -> bytes:
    """Returns the header fields of a call."""
    return b"".join(_field(name.encode(), value.encode()) for name, value in _fields(path, tenant).items())


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


def resets(number: int, path: str = GENERATE, tenant: str = "attacker") -> bytes:
    """Returns calls that are each reset at once: 29 bytes a call after the first, whose fields the others repeat."""
    fields = _fields(path, tenant)
    new = b"".join(_field(name.encode(), value.encode(), 0x40) for name, value in fields.items())
    known = bytes(0x80 + 62 + index for index in reversed(range(len(fields))))  # 62 is the one that came last
    call = frame(_HEADERS, _END_HEADERS, 0, known) + frame(_RST_STREAM, 0, 0, struct.pack(">I", _CANCEL))
    calls = np.tile(np.frombuffer(call, np.uint8), (number - 1, 1))
    streams = np.arange(3, 2 * number, 2, dtype=">u4").view(np.uint8).reshape(-1, 4)
    for place in (5, 9 + len(known) + 5):
        calls[:, place : place + 4] = streams
    first = frame(_HEADERS, _END_HEADERS, 1, new) + frame(_RST_STREAM, 0, 1, struct.pack(">I", _CANCEL))
    return beginning(_MAX_WINDOW) + frame(_SETTINGS, _ACK) + first + calls.tobytes()


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

_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer crowd\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_UPGRADE = b"Connection: Upgrade\r\nUpgrade: %b\r\n"
_WEBSOCKET = _UPGRADE % b"websocket" + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
_ASKED = b'{"prompt": [300], "max_tokens": 1}'
_LENGTH = b"Content-Length: %d\r\n" % len(_ASKED)

HTTP_CONNECTIONS: Mapping[str, Connections] = {
    "silent": Connections(b"", 500),
    "silent and half closed": Connections(b"", 100, is_half_closed=True),
    "TLS": Connections(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50, 100),
    "an HTTP/2 preface": Connections(beginning() + frame(_PING, payload=b"12345678") * 100, 100),
    "an upgrade to HTTP/2": Connections(_GET + _UPGRADE % b"h2c" + b"HTTP2-Settings: AAMAAABk\r\n\r\n" + PREFACE),
    "a websocket and rubbish": Connections(_GET + _WEBSOCKET + b"\r\n" + b"\x82" * 1_000_000, 20),
    "a websocket of a request": Connections(_POST + _WEBSOCKET + _LENGTH + b"\r\n" + b"\x82" * 1_000_000, 20),
    "half a line": Connections(b"GET /hea", 100),
    "headers that never come": Connections(_GET, 200),
    "headers, a byte at a time": Connections(_GET + b"\r\n", 50, piece_bytes=2),
    "a body, a byte at a time": Connections(_POST + _LENGTH + b"\r\n" + _ASKED, 50, piece_bytes=4),
    "bodies that never come": Connections(_POST + _LENGTH + b"\r\n", 200),
    "bodies that stop": Connections(_POST + b"Content-Length: 15000000\r\n\r\n" + b"[" * 300_000, 50),
    "chunks that never end": Connections(_POST + _CHUNKED + b"\r\n" + b"1\r\na\r\n" * 1_000, 100),
    "a chunk of 2^60 bytes": Connections(_POST + _CHUNKED + b"\r\nfffffffffffffff\r\n" + b"a" * 100_000, 20),
    "a long chunk extension": Connections(_POST + _CHUNKED + b"\r\n1;" + b"a" * 1_000_000, 20),
    "trailers that never end": Connections(_POST + _CHUNKED + b"\r\n0\r\n" + b"a: b\r\n" * 100_000, 20),
    "headers of 1 MB": Connections(_GET + b"X: " + b"a" * 1_000_000, 20),
    "100,000 headers": Connections(_GET + b"X: a\r\n" * 100_000, 20),
    "a path of 1 MB": Connections(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n", 20),
    "waiting for leave": Connections(_POST + b"Expect: 100-continue\r\n" + _LENGTH + b"\r\n", 100),
    "many requests at once": Connections((_GET + b"\r\n") * 5_000, 20),
    "many requests that are queued": Connections((_POST + _LENGTH + b"\r\n" + _ASKED) * 200, 10),
    "reset": Connections(_GET + b"\r\n", 200, is_reset=True),
    "requests that are reset": Connections(_POST + _LENGTH + b"\r\n" + _ASKED, 200, is_reset=True),
    "zeros": Connections(b"\0" * 100_000, 20),
}

# Requests of which two readers may see different ends, or different requests. Each has another request inside.
_INNER = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
AMBIGUOUS: Mapping[str, bytes] = {
    "a length and chunks": _POST + b"Content-Length: 5\r\n" + _CHUNKED + b"\r\n0\r\n\r\n" + _INNER,
    "chunks and a length": _POST + _CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + _INNER,
    "two lengths": _POST + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(_INNER) + _INNER,
    "a list of lengths": _POST + b"Content-Length: 0, %d\r\n\r\n" % len(_INNER) + _INNER,
    "a length with a sign": _POST + b"Content-Length: +0\r\n\r\n" + _INNER,
    "a negative length": _POST + b"Content-Length: -1\r\n\r\n" + _INNER,
    "a length in hexadecimal": _POST + b"Content-Length: 0x0\r\n\r\n" + _INNER,
    "a folded line": _POST + b"X: a\r\n Content-Length: 0\r\n\r\n" + _INNER,
    "a space before the colon": _POST + b"Content-Length : 0\r\n\r\n" + _INNER,
    "a header without a colon": _POST + b"Content-Length\r\n\r\n" + _INNER,
    "a zero in a header": _POST + b"X: a\0b\r\n\r\n" + _INNER,
    "a carriage return in a header": _POST + b"X: a\rContent-Length: 0\r\n\r\n" + _INNER,
    "another coding": _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + _INNER,
    "chunks twice": _POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + _INNER,
    "a chunk that is longer": _POST + _CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n" + _INNER,
    "a size with a sign": _POST + _CHUNKED + b"\r\n+1\r\na\r\n0\r\n\r\n" + _INNER,
    "another version": b"GET /health HTTP/3.7\r\nHost: localhost\r\n\r\n" + _INNER,
    "no version": b"GET /health\r\n\r\n" + _INNER,
}
