"""Servers of this machine are reached without the environment's proxy; here, one that refuses everything."""

import asyncio
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.loopback import is_loopback, open_url, proxy_options
from meshserve.runtime.client import handshake
from meshserve.runtime.client.client import AsyncClient, Client
from meshserve.runtime.client.dashboard.top import Reader
from meshserve.runtime.server.lifecycle import Listen
from tests.runtime.loopback import running

ROOT = Path(__file__).parents[3]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests to the environment's proxy, which answers none."""
    found: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            found.append(self.rfile.readline().decode(errors="replace"))
            self.close_connection = True

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield found
    proxy.shutdown()
    proxy.server_close()


def test_clients_and_top_ask_the_server_itself(asked: list[str]):
    async def model(target: str) -> str:
        async with AsyncClient(target) as client:
            return (await client.model_info()).name

    with running(listen=Listen(http_port=0)) as server:
        port = server.target.rpartition(":")[2]
        for target in (server.target, f"localhost:{port}", f"0.0.0.0:{port}", f"dns:///localhost:{port}"):
            with Client(target) as client:
                assert client.model_info().name == "toy"
            assert asyncio.run(model(target)) == "toy"
        with Client(server.target, resumes=1) as client:
            assert client.model_info().name == "toy"
            assert Reader(client, server.target, f"127.0.0.1:{server.handle.http_port}").read().load is not None
        assert not handshake.speaks_tls(server.target)
    assert asked == []


def test_other_machines_are_reached_through_the_proxy(asked: list[str]):
    with pytest.raises(OSError):
        open_url("http://model.example/metrics", timeout_seconds=5.0)
    assert asked and asked[0].startswith("GET http://model.example/metrics")


@pytest.mark.parametrize(
    ("target", "is_here"),
    [
        ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("localhost:1", True), ("localhost", True), ("[::1]:1", True),
        ("dns:///127.0.0.1:1", True), ("dns:localhost:1", True), ("dns://8.8.8.8/localhost:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True), ("ipv6:[::1]:1", True), ("0.0.0.0:1", True), ("[::]:1", True),
        ("10.0.0.1:1", False), ("model.example:443", False), ("dns:///model.example", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False), ("xds:///localhost", False), ("localhost.example:1", False),
    ],
)  # fmt: skip
def test_targets_of_this_machine(target: str, is_here: bool):
    assert bool(proxy_options(target)) == is_here


def test_loopback_addresses():
    assert [host for host in ("127.0.0.1", "[::1]", "localhost", "0.0.0.0", "10.0.0.1", "") if is_loopback(host)] == [
        "127.0.0.1", "[::1]", "localhost",
    ]  # fmt: skip


@pytest.mark.parametrize("folder", ["runtime", "deploy", "benchmarks"])
def test_every_channel_and_url_is_opened_like_this(folder: str):
    calls: list[Any] = []
    for path in (ROOT / folder).rglob("*.py"):
        calls += [(path.name, found[0]) for found in re.finditer(r"(secure_channel|urlopen)\(.*", path.read_text())]
    own = {"loopback.py", "stream_client.py"}  # the step stream never uses a proxy
    assert [call for call in calls if call[0] not in own and "proxy_options" not in call[1]] == [
        ("application.py", "secure_channel(self._child.target, options=options))")
    ] * (folder == "deploy")
