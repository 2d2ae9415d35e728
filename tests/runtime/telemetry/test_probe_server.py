"""Limits and shutdown of the HTTP port; `test_rpcs.py` tests its answers in a running server."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.loopback import is_host_allowed
from meshserve.runtime.telemetry import probe_server
from meshserve.runtime.telemetry.probe_server import HttpPort
from tests.runtime.loopback import logged_errors
from tests.waiting import WAIT_SECONDS

Answer = tuple[int, dict[str, str], bytes]


def serving(
    use: Callable[[int], Awaitable[Any]], run: Callable = uvloop.run, registry: CollectorRegistry | None = None
) -> Any:
    """Runs `use` with the number of an open port, and closes it."""

    async def main() -> Any:
        http = HttpPort({"/livez": lambda: (200, "ok\n")}, registry or CollectorRegistry(), ["proxy.example"])
        port = await http.start("127.0.0.1", 0)
        assert port is not None
        try:
            return await use(port)
        finally:
            await http.stop()

    return run(main())


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Reads until the server closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    except ConnectionResetError:
        return b""


async def ask(port: int, request: str) -> Answer:
    """Sends one request and reads until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


def get(path: str, *headers: str) -> str:
    return "\r\n".join((f"GET {path} HTTP/1.1", "Host: localhost:9090", *headers, "", ""))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_open_connections_end_with_the_port_and_without_a_trace(run, caplog):
    async def use(port: int) -> list[asyncio.StreamReader]:
        readers = []
        for begun in (b"", b"GET /li", get("/livez").encode()[:-2]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            readers.append((reader, writer))
        assert (await ask(port, get("/livez")))[0] == 200  # the port has seen the earlier connections
        return readers

    async def main() -> list[bytes]:
        http = HttpPort({"/livez": lambda: (200, "ok\n")}, CollectorRegistry())
        port = await http.start("127.0.0.1", 0)
        assert port is not None
        opened = await use(port)
        await http.stop()
        ends = [await read_all(reader) for reader, _ in opened]
        for _, writer in opened:
            writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        return ends

    with caplog.at_level(logging.ERROR):
        assert run(main()) == [b""] * 3
    assert caplog.records == []


def test_connections_that_send_no_whole_request_are_closed(monkeypatch, caplog):
    monkeypatch.setattr(probe_server, "_TIMEOUT_SECONDS", 0.05)

    async def use(port: int) -> None:
        for begun in ("", "GET /li", get("/livez")[:-2]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun.encode())
            assert await read_all(reader) == b""
            writer.close()

    serving(use)
    assert logged_errors(caplog.records) == []


def test_the_oldest_connection_makes_room_for_a_new_one():
    async def use(port: int) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(probe_server._MAX_CONNECTIONS)]
        assert (await ask(port, get("/livez")))[::2] == (200, b"ok\n")
        assert await read_all(opened[0][0]) == b""
        opened[-1][1].write(get("/livez").encode())
        assert (await read_all(opened[-1][0])).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()

    serving(use)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (get("/livez", "A: " + "b" * 10_000), 400),
        (get("/livez?" + "b" * 10_000), 400),
        (get("/livez", *(f"A{index}: b" for index in range(200))), 400),
        ("\x16\x03\x01 not HTTP\r\n\r\n", 400),
        (get("/livez").replace("GET", "POST"), 405),
        (get("/nothing"), 404),
        (get("/livez", "Content-Length: 1000000"), 200),  # and the body never comes
        (get("/livez").replace("GET", "HEAD"), 200),
        (get("/metrics", "Accept: text/plain;version=one"), 200),
    ],
)
def test_each_request_gets_an_answer_and_the_log_no_error(request_text, status, caplog):
    assert serving(lambda port: ask(port, request_text))[0] == status
    assert logged_errors(caplog.records) == []


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True), ("localhost:9090", True), ("LOCALHOST", True), ("127.0.0.1:9090", True),
        ("127.1.2.3", True), ("[::1]:9090", True), ("proxy.example", True), ("evil.example:9090", False),
        ("localhost.evil.example", False),
        ("10.0.0.1", False), ("", False), ("[", False), ("evil.example@localhost", True),
    ],
)  # fmt: skip
def test_on_loopback_only_localhosts_names_are_answered(host: str, is_allowed: bool):
    """A web page may have its own name resolved to 127.0.0.1, but cannot choose the header."""
    for path in ("/metrics", "/livez", "/nothing"):
        status, headers, body = serving(lambda port: ask(port, get(path).replace("localhost:9090", host)))  # noqa: B023
        assert status == (403 if not is_allowed else 404 if path == "/nothing" else 200)
        assert headers["connection"] == "close" and (is_allowed or b"--allowed-hosts" in body)


def test_where_other_machines_reach_the_server_any_name_may_lead_to_it():
    assert is_host_allowed("some.example:9090", "0.0.0.0") and is_host_allowed("some.example", "10.0.0.1")
    assert is_host_allowed("some.example", "127.0.0.1", ["*"]) and is_host_allowed(None, "127.0.0.1")


def test_metrics_come_in_the_format_that_the_scraper_accepts():
    registry = CollectorRegistry()
    Counter("meshserve_things_total", "Things.", registry=registry).inc()
    _, headers, body = serving(lambda port: ask(port, get("/metrics")), registry=registry)
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (
        headers["connection"] == "close"
        and b"# TYPE meshserve_things_total counter\nmeshserve_things_total 1.0" in body
    )
    openmetrics = "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    _, headers, body = serving(lambda port: ask(port, get("/metrics", openmetrics)), registry=registry)
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert b"# TYPE meshserve_things counter\n" in body and body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "text/plain;version=1.0.0;escaping=underscores",
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",  # Prometheus 2
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;q=0.2",  # Prometheus 3
    ],
)
def test_names_with_a_colon_are_the_same_in_every_format(accept):
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Requests that are running.", registry=registry).set(2)
    _, _, body = serving(lambda port: ask(port, get("/metrics", f"Accept: {accept}")), registry=registry)
    assert b"\nvllm:num_requests_running 2.0\n" in body


def test_a_scrape_that_waits_for_the_engine_holds_up_no_probe():
    class Slow(Collector):
        """Like an engine whose step holds its lock."""

        may_end = threading.Event()

        def collect(self) -> Iterator[GaugeMetricFamily]:
            assert self.may_end.wait(WAIT_SECONDS)
            yield GaugeMetricFamily("a", "A.", value=1)

    async def use(port: int) -> None:
        scrape = asyncio.create_task(ask(port, get("/metrics")))
        assert (await ask(port, get("/livez")))[0] == 200 and not scrape.done()
        slow.may_end.set()
        assert b"a 1.0" in (await scrape)[2]

    registry, slow = CollectorRegistry(), Slow()
    registry.register(slow)
    serving(use, registry=registry)


def test_scrapes_that_come_together_share_a_rendering(monkeypatch):
    """Also with callers who leave: any number of them is rendered once, after the rendering that has begun."""

    class Counted(Collector):
        began, may_end, num_calls = threading.Event(), threading.Event(), 0

        def collect(self) -> Iterator[GaugeMetricFamily]:
            self.began.set()
            assert self.may_end.wait(WAIT_SECONDS)
            self.num_calls += 1
            yield GaugeMetricFamily("calls", "Calls.", value=self.num_calls)

    monkeypatch.setattr(probe_server, "_TIMEOUT_SECONDS", WAIT_SECONDS)

    async def use(port: int) -> None:
        first = asyncio.create_task(ask(port, get("/metrics")))
        assert await asyncio.to_thread(counted.began.wait, WAIT_SECONDS)
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/metrics").encode())
            await ask(port, get("/livez"))  # the port has seen it
            writer.transport.abort()
        others = [asyncio.create_task(ask(port, get("/metrics"))) for _ in range(20)]
        assert (await ask(port, get("/livez")))[0] == 200
        counted.may_end.set()
        assert b"calls 1.0" in (await first)[2]
        assert all(b"calls 2.0" in each[2] for each in await asyncio.gather(*others))

    registry, counted = CollectorRegistry(), Counted()
    registry.register(counted)
    serving(use, registry=registry)
    assert counted.num_calls == 2


def test_a_port_in_use_is_a_config_error(caplog):
    async def use(port: int) -> None:
        with pytest.raises(ConfigError, match="Choose another --http-port"):
            await HttpPort({}, CollectorRegistry()).start("127.0.0.1", port)

    serving(use)
    assert logged_errors(caplog.records) == []
