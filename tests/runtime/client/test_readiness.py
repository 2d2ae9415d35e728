"""Tests that the first call of a client waits for a server that is starting, and only for such a server."""

import asyncio
import contextlib
import http.server
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.client import readiness
from meshserve.runtime.client.client import AsyncClient, CallError, Client
from meshserve.runtime.commands.local_cluster import reserved_port
from meshserve.runtime.server.tls import TlsFiles
from tests.certificates import certificate
from tests.waiting import WAIT_SECONDS

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Starting(pb_grpc.InferenceServiceServicer, health_pb2_grpc.HealthServicer):
    """A server that refuses requests until its health has been asked for `num_checks` times."""

    def __init__(self, num_checks: int = 3) -> None:
        self.num_checks, self.num_asked = num_checks, 0
        self.state = pb.SERVER_STATE_STARTING
        self.target = ""

    def Check(self, request, context):
        self.num_asked += 1
        return health_pb2.HealthCheckResponse(status=SERVING if self.num_asked > self.num_checks else NOT_SERVING)

    def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(state=self.state, progress="compiling the programs")

    def Generate(self, request, context):
        if self.num_asked <= self.num_checks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        yield pb.GenerateResponse(text="here", finish=pb.Finish(reason=pb.FINISH_REASON_STOP))

    def GetLoad(self, request, context):
        return pb.GetLoadResponse()


@pytest.fixture
def starting() -> Iterator[Starting]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    script = Starting()
    pb_grpc.add_InferenceServiceServicer_to_server(script, server)
    health_pb2_grpc.add_HealthServicer_to_server(script, server)
    script.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield script
    server.stop(0).wait()


def test_the_first_call_waits_until_the_server_is_ready(starting, monkeypatch, caplog):
    monkeypatch.setattr(readiness, "_SILENT_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING), Client(starting.target) as client:
        assert client.complete([1], max_tokens=1).text == "here"
        assert starting.num_asked == 4
        client.complete([1], max_tokens=1)
        assert starting.num_asked == 4, "later calls do not ask"
    said = [record.getMessage() for record in caplog.records]
    expected = f"the server at {starting.target} is starting (compiling the programs); waiting up to 300 s"
    assert said == [expected], "once, although it was asked three times"


def test_a_client_that_resumes_waits_for_a_server_that_its_channel_does_not_reach(monkeypatch):
    """Balanced calls go only to servers whose health is SERVING."""
    monkeypatch.setattr(readiness, "_UNREACHABLE_SECONDS", 0.0)
    server, script, healths = grpc.server(futures.ThreadPoolExecutor(8)), Starting(num_checks=-1), HealthServicer()
    name, num_asked = readiness._HEALTH_REQUEST.service, itertools.count()
    healths.set(name, NOT_SERVING)

    def server_info(request, context):
        if next(num_asked) == 3:
            healths.set(name, SERVING)
        return pb.GetServerInfoResponse(state=pb.SERVER_STATE_STARTING)

    monkeypatch.setattr(script, "GetServerInfo", server_info)
    pb_grpc.add_InferenceServiceServicer_to_server(script, server)
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    target = f"ipv4:127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with Client(target, resumes=2) as client:
            assert client.complete([1], max_tokens=1).text == "here"
    finally:
        server.stop(0).wait()


def test_the_async_client_waits_too(starting):
    async def main() -> None:
        async with AsyncClient(starting.target) as client:
            await client.load()
            assert starting.num_asked == 4
            assert (await client.complete([1])).text == "here"

    asyncio.run(main())


def test_the_wait_is_bounded_and_says_what_the_server_does(starting):
    starting.num_checks = 10**9
    with Client(starting.target, ready_seconds=0.3) as client, pytest.raises(CallError) as caught:
        client.complete([1])
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert "is starting (compiling the programs). It was not ready within 0.3 s" in str(caught.value)


def test_a_time_limit_of_the_call_holds_for_the_wait(starting):
    starting.num_checks = 10**9
    with Client(starting.target) as client, pytest.raises(CallError, match="not ready within 0.2 s"):
        client.complete([1], timeout_seconds=0.2)


@pytest.mark.parametrize("state", [pb.SERVER_STATE_DRAINING, pb.SERVER_STATE_FAILED])
def test_a_server_that_will_not_be_ready_is_not_waited_for(starting, state):
    starting.num_checks, starting.state = 10**9, state
    with Client(starting.target) as client, pytest.raises(CallError, match="not now"):
        client.complete([1])
    assert starting.num_asked == 1


def test_a_client_need_not_wait(starting):
    with Client(starting.target, ready_seconds=0) as client, pytest.raises(CallError, match="not now"):
        client.complete([1])
    assert starting.num_asked == 0
    with pytest.raises(ValueError, match="ready_seconds is -1; it must be 0 or more"):
        Client(starting.target, ready_seconds=-1)


def test_where_nobody_answers_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(readiness, "_UNREACHABLE_SECONDS", 0.3)
    with reserved_port() as port, Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(CallError, match="no server answers at .* Start one with `meshserve serve`") as caught:
            client.complete([1], timeout_seconds=WAIT_SECONDS)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.__suppress_context__, "a traceback shows one error"


def test_a_refused_handshake_is_an_error_at_once(tmp_path):
    """Each within a fraction of the time for which an unreachable server is waited for."""
    other, shown = certificate(tmp_path, "other"), certificate(tmp_path, "shown")
    elsewhere, caller = certificate(tmp_path, "elsewhere", address="127.0.0.9"), certificate(tmp_path, "caller")

    def authority(tls: TlsFiles) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(tls.certificate.read_bytes())

    with (
        serving_tls(shown) as secure,
        serving_tls(elsewhere) as misnamed,
        serving_tls(shown, caller) as mutual,
        serving_tls(None) as plain,
        serving_http() as web,
    ):
        for target, credentials, expected in (
            (secure, authority(other), "was refused (self signed certificate). Pass the certificate of the authority"),
            (secure, None, "uses TLS, and this client does not"),
            (mutual, None, "uses TLS, and this client does not"),
            (mutual, authority(shown), "may require a certificate of the client"),
            (misnamed, authority(elsewhere), "is for another name"),
            (plain, authority(shown), "does not use TLS"),
            (web, None, "does not answer as gRPC"),
        ):
            with Client(target, credentials=credentials) as client:
                with pytest.raises(CallError) as caught:
                    client.complete([1])
                assert expected in str(caught.value) and caught.value.__suppress_context__
                with pytest.raises(CallError) as again:
                    client.wait_until_ready(WAIT_SECONDS)
                assert expected in str(again.value)
        assert "uses TLS" in asyncio.run(first_error(secure))


async def first_error(target: str) -> str:
    async with AsyncClient(target) as client:
        with pytest.raises(CallError) as caught:
            await client.load()
        return str(caught.value)


@contextlib.contextmanager
def serving_tls(tls: TlsFiles | None, callers: TlsFiles | None = None) -> Iterator[str]:
    """Yields the address of a server without services, which shows a certificate and may ask callers for one."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pairs = [(tls.key.read_bytes(), tls.certificate.read_bytes())]
        wanted = callers.certificate.read_bytes() if callers is not None else None
        port = server.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials(pairs, wanted, require_client_auth=callers is not None)
        )
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def serving_http() -> Iterator[str]:
    class Silent(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_script_that_fails_shows_one_error(starting):
    code = f"""
from meshserve.client import Client
with Client("{starting.target}", ready_seconds=0) as client:
    client.complete([1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "meshserve.runtime.client.messages.CallError: UNAVAILABLE: not now"
