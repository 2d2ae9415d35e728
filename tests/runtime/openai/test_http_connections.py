"""Connections of the OpenAI port: which are closed, and which make room for others."""

import contextlib
import gc
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.openai import http_connections, openai_port
from meshserve.runtime.openai.http_connections import HttpConnections
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.server.lifecycle import Listen
from tests.certificates import certificate
from tests.runtime.loopback import running
from tests.waiting import WAIT_SECONDS, wait_for


class Transport:
    def __init__(self) -> None:
        self.unread, self.is_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.is_aborted = True


class Protocol:
    def __init__(self) -> None:
        self.transport: Transport | None = Transport()


class Server:
    """Makes protocols, as aiohttp's does, which are connected at once."""

    def __init__(self) -> None:
        self.all: list[Protocol] = []

    def __call__(self) -> Protocol:
        self.all.append(Protocol())
        return self.all[-1]

    @property
    def connections(self) -> list[Protocol]:
        return [each for each in self.all if each.transport is not None and not each.transport.is_aborted]


def accepted(connections: HttpConnections) -> Any:
    """Returns the server's protocol of a new connection."""
    return connections.accept().protocol  # type: ignore[attr-defined]


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Nothing is called by itself."""


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http_connections.asyncio, "get_running_loop", lambda: clock)
    return clock


def test_at_the_limit_connections_that_are_served_are_kept(clock: Clock, monkeypatch):
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", 3)
    server = Server()
    connections = HttpConnections(server)  # type: ignore[arg-type]
    served, proper, silent = (accepted(connections) for _ in range(3))
    for each in (served, proper):
        connections.begin(each)
        connections.serve(each)
    connections.end(proper)
    assert server.connections == [served, proper, silent]
    last = accepted(connections)
    assert server.connections == [served, proper, last], "nothing proper has come over it"
    connections.begin(last)
    connections.serve(last)
    final = accepted(connections)
    assert server.connections == [served, last, final], "it waits for nothing"
    connections.serve(final)
    assert not hasattr(connections.accept(), "protocol")
    assert server.connections == [served, last, final]


def test_connections_that_do_not_move_are_closed(clock: Clock):
    server = Server()
    connections = HttpConnections(server)  # type: ignore[arg-type]
    silent, asking, stalled, slow = (accepted(connections) for _ in range(4))
    for each in (asking, stalled, slow):
        connections.begin(each)
    sizes = iter(range(1_000, 0, -1))
    stalled.transport.unread = 1_000
    for second in range(0, 60, 5):
        clock.now = float(second)
        slow.transport.unread = next(sizes)
        connections._sweep()
        assert (silent in server.connections) == (second < http_connections.HEADER_SECONDS)
        assert (stalled in server.connections) == (second < http_connections.STALLED_SECONDS)
    assert server.connections == [asking, slow]


def test_handshakes_that_never_end_are_ended(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(openai_port, "HEADER_SECONDS", 0.1)
    listen = Listen(
        drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort, tls=certificate(tmp_path, "127.0.0.1")
    )
    with running(listen=listen) as server:
        assert server.handle.openai_port is not None
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            address = ("127.0.0.1", server.handle.openai_port)
            with socket.create_connection(address, timeout=WAIT_SECONDS) as connection:
                connection.sendall(sent)
                assert connection.recv(1) == b""


def test_what_follows_something_that_is_no_request_is_not_kept(monkeypatch):
    """Each piece of it would be an error of its own, which leads to the piece."""
    queued: list[int] = []
    received = http_connections._Connection.data_received

    def receive(connection: Any, data: bytes) -> None:
        received(connection, data)
        queued.append(len(connection.protocol._messages))

    monkeypatch.setattr(http_connections._Connection, "data_received", receive)
    listen = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort)
    with running(listen=listen) as server:
        assert server.handle.openai_port is not None
        address = ("127.0.0.1", server.handle.openai_port)
        with socket.create_connection(address, timeout=WAIT_SECONDS) as connection:
            with contextlib.suppress(OSError):  # the server may close it before it has read all
                connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx" + b"y" * 2**24)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(12) in (b"", b"HTTP/1.0 400")
        wait_for(lambda: not [each for each in gc.get_objects() if isinstance(each, http_connections._Connection)])
    assert queued and max(queued) <= 2, queued
