"""Bodies of requests: their bounds, and that slow or large ones keep nobody from sending others."""

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable, Iterator

import pytest

from meshserve.runtime.api.errors import QueueFullError, QuotaExceededError
from meshserve.runtime.openai import bodies, openai_port
from meshserve.runtime.openai.api_errors import ErrorAnswer, error_answer
from meshserve.runtime.openai.bodies import Bodies
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.server.inference_service import MAX_MESSAGE_BYTES
from meshserve.runtime.server.lifecycle import Listen
from tests.runtime.loopback import Running, running
from tests.waiting import WAIT_SECONDS, wait_for

LISTEN = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=OpenAIPort)
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def server() -> Iterator[Running]:
    with running(listen=LISTEN) as server:
        yield server


def connected(server: Running, text: str) -> socket.socket:
    """Returns a connection on which a text has been sent."""
    assert server.handle.openai_port is not None
    connection = socket.create_connection(("127.0.0.1", server.handle.openai_port), timeout=WAIT_SECONDS)
    connection.sendall(text.encode())
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server: Running):
    with connected(server, f"{POST}Content-Length: {MAX_MESSAGE_BYTES + 1}\r\n\r\n") as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"allowed are 16777216 bytes" in answer


def test_a_body_without_a_length_is_refused_once_it_is_too_large(server: Running):
    with connected(server, f"{POST}Transfer-Encoding: chunked\r\n\r\n") as connection:
        piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        with pytest.raises(OSError):  # the server has closed it
            for _ in range(64):
                connection.sendall(piece)


@pytest.mark.parametrize(
    ("headers", "first"),
    [
        ("Content-Length: 15\r\n", b"HTTP/1.1 100 "),
        ("Content-Length: 20000000\r\n", b"HTTP/1.1 413 "),
        ("Content-Length: 15\r\nX-Request-Timeout: never\r\n", b"HTTP/1.1 400 "),
    ],
)
def test_only_a_body_that_will_be_read_is_asked_for(server: Running, headers: str, first: bytes):
    with connected(server, f"{POST}Expect: 100-continue\r\n{headers}\r\n") as connection:
        answer = connection.recv(65_536)
        assert answer.startswith(first)
        if b" 100 " in first:
            connection.sendall(b'{"prompt": "a"}')
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_bodies_that_do_not_come_hold_up_no_others(server: Running):
    slow = [connected(server, f"{POST}Content-Length: 100\r\n\r\n{{") for _ in range(200)]
    text = '{"prompt": "a", "max_tokens": 1}'
    with connected(server, f"{POST}Content-Length: {len(text)}\r\n\r\n{text}") as connection:
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
    for each in slow:
        each.close()


class Request:
    """A request whose body comes in pieces that the test gives."""

    def __init__(self, length: int | None = None):
        self.content_length, self.headers, self.content = length, {}, self
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def readany(self) -> bytes:
        return await self.pieces.get()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1_000):
        await asyncio.sleep(0)
        if condition():
            return
    raise AssertionError("it has not happened")


def test_a_tenant_may_send_half_of_the_bytes_at_a_time(monkeypatch):
    monkeypatch.setattr(bodies, "_MAX_HELD_BYTES", 1_000_000)

    async def check() -> None:
        all_bodies, requests, reads = Bodies(), [], []

        def begin(tenant: str, num_bytes: int) -> None:
            requests.append(Request())
            requests[-1].pieces.put_nowait(b" " * num_bytes)
            reads.append(asyncio.ensure_future(all_bodies.parsed(requests[-1], tenant, 64)))  # type: ignore[arg-type]

        begin("a", 300_000)
        await until(lambda: all_bodies.num_held == 300_000)
        begin("a", 300_000)
        await until(reads[1].done)
        assert isinstance(reads[1].exception(), QuotaExceededError)
        for tenant in "bc":
            begin(tenant, 300_000)
        await until(lambda: all_bodies.num_held == 900_000)
        begin("d", 300_000)
        await until(reads[4].done)
        assert isinstance(reads[4].exception(), QueueFullError)
        begin("a", 60_000)  # small ones are not counted
        requests[5].pieces.put_nowait(b"[]")
        requests[5].pieces.put_nowait(b"")
        assert (await reads[5])[0] == []
        for tenant in "abc":
            reads["abc".index(tenant) + (tenant > "a")].cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        assert all_bodies.num_held == 0

    asyncio.run(check())


def test_a_body_must_come_in_time(monkeypatch):
    monkeypatch.setattr(bodies, "_BODY_SECONDS", 0.01)

    async def check() -> None:
        with pytest.raises(TimeoutError):
            await Bodies().parsed(Request(1_000), "", 64)  # type: ignore[arg-type]

    asyncio.run(check())


def test_a_refused_body_leaves_nothing_to_the_garbage_collector(server: Running, monkeypatch):
    """Errors lead to what the call had in memory, which a body can make large."""
    errors: list[weakref.ref[BaseException]] = []

    def answer_to(error: BaseException) -> ErrorAnswer:
        errors.append(weakref.ref(error))
        return error_answer(error)

    monkeypatch.setattr(openai_port, "error_answer", answer_to)
    gc.disable()
    try:
        with connected(server, f"{POST}Content-Length: 200000\r\n\r\n" + 200_000 * "x") as connection:
            assert connection.recv(65_536).startswith(b"HTTP/1.1 400 ")
        wait_for(lambda: not [error for reference in errors if (error := reference())])
    finally:
        gc.enable()
    assert len(errors) == 1
