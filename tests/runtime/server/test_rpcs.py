"""The methods beside Generate and Chat, against a server on loopback."""

import contextlib
import dataclasses
import gc
import logging
import socket
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import BadStatusLine, HTTPConnection
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import (
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
    QuotaExceededError,
    UnauthenticatedError,
    UnavailableFeatureError,
)
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.client.client import CallError, Client, call_errors
from meshserve.runtime.server.edge import Edge
from meshserve.runtime.server.grpc_status import GRPC_STATUS
from meshserve.runtime.server.lifecycle import Listen, _probes, run_server
from meshserve.runtime.server.method_permissions import QUEUED_METHODS, SERVICE_NAME
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.telemetry.metrics import METHODS, REFUSAL_CODES
from meshserve.runtime.telemetry.profiler import BetweenSteps
from tests.runtime.loopback import INFO, FakeEngine, Running, edge_of, running
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode


class Profiler:
    def __init__(self) -> None:
        self.is_recording = False

    def start(self, between_steps: BetweenSteps) -> str:
        if self.is_recording:
            raise UnavailableFeatureError("a profile is being recorded")
        self.is_recording = True
        return "/profiles/1"

    def stop(self, between_steps: BetweenSteps) -> str:
        self.is_recording = False
        return "/profiles/1"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    listen = Listen(http_port=0, profiler=Profiler())  # type: ignore[arg-type]
    with running(listen=listen) as server:
        yield server


def call(target: str, method: str, request: Any) -> Any:
    """One unary call, by the method's name."""
    with grpc.insecure_channel(target) as channel, call_errors():
        for stub in (pb_grpc.InferenceServiceStub(channel), pb_grpc.AdminServiceStub(channel)):
            if hasattr(stub, method):
                return getattr(stub, method)(request, timeout=WAIT_SECONDS)
    raise AssertionError(method)


def test_tokenize_and_detokenize(server):
    tokens = call(server.target, "Tokenize", pb.TokenizeRequest(text="abc"))
    assert list(tokens.token_ids) == [97, 98, 99]
    assert call(server.target, "Detokenize", pb.DetokenizeRequest(token_ids=tokens.token_ids)).text == "abc"
    talk = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")], enable_thinking=False)
    tokens = call(server.target, "Tokenize", pb.TokenizeRequest(conversation=talk))
    assert bytes(tokens.token_ids).decode() == "user: hi\nno thinking\n"


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "input"),
        ("Tokenize", pb.TokenizeRequest(text="a" * 20_000), "text"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation()), "messages"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 128]), "token_ids"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * (2**20 + 1)), "token_ids"),
        ("Abort", pb.AbortRequest(request_ids=["a"] * 1025), "request_ids"),
        ("Drain", pb.DrainRequest(grace_seconds=-1.0), "grace_seconds"),
        ("Drain", pb.DrainRequest(grace_seconds=float("nan")), "grace_seconds"),
    ],
)
def test_what_they_refuse(server, method, request_message, field):
    with pytest.raises(CallError) as caught:
        call(server.target, method, request_message)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)


MOST = 2**22 - 2**10  # bytes of an answer, of which a few describe it


@pytest.mark.parametrize("excess", [0, 1])
def test_answers_are_no_longer_than_clients_take(server, monkeypatch, excess: int):
    """With gRPC's default limit. A token may have many characters, and a character many bytes."""
    assert server.edge.backend is not None
    tokenizer = server.edge.backend.tokenizer
    text = "é" * (MOST // 2) + "x" * excess
    token_ids = (1,) * (MOST - 5 + excess)  # beside the field's number and length
    monkeypatch.setattr(tokenizer, "decode", lambda token_ids: text)
    monkeypatch.setattr(tokenizer, "encode", lambda text: token_ids)
    tokenize, detokenize = pb.TokenizeRequest(text="a"), pb.DetokenizeRequest(token_ids=[1, 2])
    if not excess:
        assert call(server.target, "Detokenize", detokenize).text == text
        assert tuple(call(server.target, "Tokenize", tokenize).token_ids) == token_ids
        return
    for method, asked, field in (("Tokenize", tokenize, "text"), ("Detokenize", detokenize, "token_ids")):
        with pytest.raises(CallError, match=f"an answer of {MOST + 1} bytes; allowed are {MOST}, because") as caught:
            call(server.target, method, asked)
        assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)


@contextlib.contextmanager
def slow_texts(server: Running) -> Iterator[threading.Event]:
    """Texts that begin with "slow" are not tokenised until the event is set."""
    assert server.edge.backend is not None
    tokenizer, opened = server.edge.backend.tokenizer, threading.Event()
    encode, decode = tokenizer.encode, tokenizer.decode

    def slow_encode(text: str) -> tuple[int, ...]:
        assert not text.startswith("slow") or opened.wait(WAIT_SECONDS)
        return encode(text)

    def slow_decode(token_ids: Sequence[int]) -> str:
        assert opened.wait(WAIT_SECONDS)
        return decode(token_ids)

    tokenizer.encode, tokenizer.decode = slow_encode, slow_decode  # type: ignore[method-assign]
    try:
        yield opened
    finally:
        opened.set()
        del tokenizer.encode, tokenizer.decode  # type: ignore[method-assign]


def test_a_flood_of_tokenize_and_detokenize_holds_up_no_request():
    """The calls wait in a pool of their own, up to its bound; more are refused with a hint."""
    with running() as server, slow_texts(server) as opened, ThreadPoolExecutor(12) as pool:
        server.edge.serving()[1]._conversions.max_calls = 16  # a tenant may have half
        requests = [("Tokenize", pb.TokenizeRequest(text="slow")), ("Detokenize", pb.DetokenizeRequest(token_ids=[97]))]
        calls = [pool.submit(call, server.target, *request) for request in requests * 6]
        wait_for(lambda: sum(each.done() for each in calls) == 4)
        for each in calls:
            if each.done():
                with pytest.raises(CallError, match="a tenant may have 8 of") as caught:
                    each.result()
                assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_seconds >= 1.0
        with Client(server.target) as client:
            assert client.complete("a", max_tokens=1).token_ids == (98,)
            chat = [{"role": "user", "content": "a"}]
            assert list(client.chat(chat, max_tokens=1))[-1].finish.usage.num_output_tokens == 1
        opened.set()
        assert sum(each.exception() is None for each in calls) == 8


def test_a_prompt_is_not_tokenised_for_a_caller_who_has_left():
    """It waits for a thread, and its caller leaves. Prompts that come after it are tokenised, but it never is."""
    with running() as server, slow_texts(server) as opened, ThreadPoolExecutor(8) as pool:
        assert server.edge.backend is not None
        tokenizer, prompts = server.edge.backend.tokenizer, server.edge.serving()[1]._short_prompts
        encode, seen = tokenizer.encode, []

        def seeing(text: str) -> tuple[int, ...]:
            seen.append(text[:4])
            return encode(text)

        tokenizer.encode = seeing  # type: ignore[method-assign]
        long = " " * 3_000
        calls = [pool.submit(generate, server.target, pb.GenerateRequest(text="slow" + long)) for _ in range(2)]
        wait_for(lambda: seen == ["slow"] * 2)  # both threads are taken
        with grpc.insecure_channel(server.target) as channel:
            left = pb_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="left" + long))
            wait_for(lambda: prompts.num_calls == 3)
            left.cancel()
        wait_for(lambda: prompts.num_calls == 2)
        calls.append(pool.submit(generate, server.target, pb.GenerateRequest(text="more" + long)))
        wait_for(lambda: prompts.num_calls == 3)
        opened.set()
        for each in calls:  # 3,004 tokens do not fit
            assert each.result() is Code.INVALID_ARGUMENT
        assert seen == ["slow", "slow", "more"]


def test_long_prompts_hold_up_no_short_ones():
    with (
        running() as server,
        slow_texts(server) as opened,
        ThreadPoolExecutor(8) as pool,
        Client(server.target) as client,
    ):
        info = dataclasses.replace(INFO, max_context_tokens=200)  # 200 characters a token: long prompts fit
        server.edge.attach(dataclasses.replace(server.edge.backend, info=info))
        long = pb.GenerateRequest(text="slow" + " " * 20_000)
        calls = [pool.submit(generate, server.target, long) for _ in range(8)]
        intake = server.edge.serving()[1]
        wait_for(lambda: intake._long_prompts.num_calls == 8)
        with Client(server.target) as client:
            chat = [{"role": "user", "content": "a"}]
            assert list(client.chat(chat, max_tokens=1))[-1].finish.usage.num_output_tokens == 1
        opened.set()
        for each in calls:  # 20,004 tokens do not fit after all
            assert each.result() is Code.INVALID_ARGUMENT


def generate(target: str, request: pb.GenerateRequest) -> Code:
    with grpc.insecure_channel(target) as channel:
        try:
            list(pb_grpc.InferenceServiceStub(channel).Generate(request, timeout=WAIT_SECONDS))
        except grpc.RpcError as error:
            return error.code()
    return Code.OK


def test_large_messages_are_parsed_apart(server):
    ids = ["x" * 3_000_000, "y"]
    for request in (pb.AbortRequest(request_ids=ids[1:]), pb.AbortRequest(request_ids=ids)):
        assert call(server.target, "Abort", request) == pb.AbortResponse(num_aborted=0)
    with grpc.insecure_channel(server.target) as channel:
        for size in (10, 3_000_000):
            with pytest.raises(CallError, match="the bytes are not a message of this method") as caught, call_errors():
                channel.unary_unary(f"/{SERVICE_NAME}/Abort")(b"\xff" * size, timeout=WAIT_SECONDS)
            assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("num_chars", [1, 3000])  # tokenised on the event loop, and in a thread
def test_a_refused_request_is_freed_at_once(server, monkeypatch, num_chars: int):
    """gRPC keeps the exception that ended a call in a cycle, whose frames would keep messages of many megabytes."""

    class Held:
        pass

    def refuse(text: str) -> tuple[int, ...]:
        held = Held()
        found.append(weakref.ref(held))
        raise InvalidRequestError("text", "it was only a test")

    found: list[weakref.ref[Held]] = []
    monkeypatch.setattr(server.edge.backend.tokenizer, "encode", refuse)
    gc.collect()
    gc.disable()
    try:
        assert generate(server.target, pb.GenerateRequest(text="a" * num_chars)) is Code.INVALID_ARGUMENT
        wait_for(lambda: found[0]() is None)
    finally:
        gc.enable()


def test_abort_ends_streams_and_says_how_many(server):
    with Client(server.target) as client:
        streams = [client.generate("a", max_tokens=100_000, request_id=name) for name in ("one", "two", "three")]
        for stream in streams:
            next(stream)
        asked = pb.AbortRequest(request_ids=["one", "three", "three", "no such"])
        assert call(server.target, "Abort", asked).num_aborted == 2
        for stream in streams[::2]:
            assert list(stream)[-1].finish.reason is FinishReason.CANCELLED
        next(streams[1])
        streams[1].close()


def test_server_info_and_capabilities(server):
    info = call(server.target, "GetServerInfo", pb.GetServerInfoRequest())
    assert (info.state, info.progress) == (pb.SERVER_STATE_READY, "")
    assert info.uptime_seconds > 0 and info.max_message_bytes == 16 * 2**20 and info.max_stop_strings == 16
    with Client(server.target) as client:
        model = client.model_info()
        assert (model.supports_chat, model.supports_resume, model.supports_logprobs) == (True, True, False)


def test_resumed_tokens_must_be_in_the_prompt(server):
    with Client(server.target) as client:
        with pytest.raises(CallError, match="allowed is less than the prompt's 3 tokens") as caught:
            client.complete("abc", num_resumed_tokens=3)
        assert caught.value.field == "sampling.num_resumed_tokens"
        assert client.complete("abc", num_resumed_tokens=2, max_tokens=1).token_ids == (100,)


def test_flush_and_profile(server):
    assert call(server.target, "FlushPrefixCache", pb.FlushPrefixCacheRequest()).num_flushed_pages == 7
    assert call(server.target, "StartProfile", pb.StartProfileRequest()).directory == "/profiles/1"
    with pytest.raises(CallError, match="is being recorded") as caught:
        call(server.target, "StartProfile", pb.StartProfileRequest())
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert call(server.target, "StopProfile", pb.StopProfileRequest()).directory == "/profiles/1"


def test_without_a_place_for_profiles():
    with running() as server, pytest.raises(CallError, match="--profile-dir") as caught:
        call(server.target, "StartProfile", pb.StartProfileRequest())
    assert caught.value.code is Code.FAILED_PRECONDITION


def http(server: Running, path: str) -> tuple[int, str]:
    assert server.handle.http_port is not None
    return get(server.handle.http_port, path)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_drain_stops_the_server_when_the_streams_have_ended():
    listen = Listen(drain_seconds=0.0, http_port=0)
    with running(listen=listen) as server, Client(server.target) as client:
        assert http(server, "/readyz") == (200, "SERVER_STATE_READY\n")
        stream = client.generate("a", max_tokens=50)
        with server.engine.holding(50):
            next(stream)
            asked = pb.DrainRequest(grace_seconds=WAIT_SECONDS)
            assert call(server.target, "Drain", asked).num_open_requests == 1
            with pytest.raises(CallError, match="the server is stopping"):
                while True:
                    client.complete("a", max_tokens=1)
            assert http(server, "/readyz")[0] == 503 and http(server, "/livez")[0] == 200
        assert list(stream)[-1].finish.usage.num_output_tokens == 50
        server.join()
        assert server.errors == []


def test_drain_with_no_grace_fails_what_runs():
    listen = Listen(drain_seconds=1e9, status_seconds=WAIT_SECONDS)
    with running(listen=listen) as server, Client(server.target) as client:
        stream = client.generate("a", max_tokens=1_000_000, timeout_seconds=WAIT_SECONDS)
        next(stream)
        call(server.target, "Drain", pb.DrainRequest(grace_seconds=0.0))
        with pytest.raises(CallError, match="stopped before the request could end") as caught:
            list(stream)
        assert caught.value.code is Code.UNAVAILABLE
        server.join()


def samples(server: Running) -> dict[str, float]:
    """Every sample of /metrics, read by Prometheus's own parser."""
    _, text = http(server, "/metrics")
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_what_happened():
    with running(listen=Listen(http_port=0)) as server, Client(server.target) as client:
        before = samples(server)
        assert before["meshserve_ready"] == 1 and before["meshserve_output_tokens_total"] == 0
        client.complete("abc", max_tokens=10)
        stream = client.generate("a", max_tokens=100_000)
        next(stream)
        stream.close()
        cancelled = "meshserve_requests_total{method=Generate,outcome=cancelled}"
        assert samples(server)["meshserve_requests_total{method=Chat,outcome=stop}"] == 0
        wait_for(lambda: samples(server)[cancelled] == 1)
        after = samples(server)
        assert after["meshserve_requests_total{method=Generate,outcome=length}"] == 1
        assert after["meshserve_prompt_tokens_total"] == 4
        assert after["meshserve_output_tokens_total"] >= 11
        assert after["meshserve_time_to_first_token_seconds_count"] == 2
        assert after["meshserve_time_to_first_token_seconds_bucket{le=+Inf}"] == 2
        gaps, tokens = after["meshserve_inter_token_seconds_count"], after["meshserve_output_tokens_total"]
        assert gaps <= tokens - 2
        assert after["meshserve_kv_pages"] == 100 and after["meshserve_kv_free_pages"] == 90
        assert after["vllm:num_requests_waiting{model_name=toy}"] == 1
        assert after["vllm:kv_cache_usage_perc{model_name=toy}"] == pytest.approx(0.1)
        assert after["vllm:cache_config_info{block_size=16,model_name=toy,num_gpu_blocks=100}"] == 1
        assert http(server, "/nothing")[0] == 404


def test_http_clients_at_the_grpc_port_are_told_of_in_the_log(caplog):
    """As docs/coming_from.md says: grpc answers them in HTTP/2, and tells the server nothing."""
    caplog.set_level(logging.INFO)
    with running() as server:
        host, _, port = server.target.rpartition(":")
        asking = HTTPConnection(host, int(port), timeout=WAIT_SECONDS)
        asking.request("GET", "/v1/models")
        with pytest.raises(BadStatusLine):
            asking.getresponse()
        asking.close()
    assert f"port {port} speaks gRPC; HTTP clients need --openai-port" in caplog.text


def test_connections_that_ask_nothing_keep_no_probe_out():
    with running(listen=Listen(http_port=0)) as server, contextlib.ExitStack() as stack:
        for _ in range(100):  # more than are kept open
            address = ("127.0.0.1", server.handle.http_port)
            stack.enter_context(socket.create_connection(address, timeout=WAIT_SECONDS))
        assert http(server, "/livez")[0] == 200


def test_probes_while_the_engine_dies():
    room = OutputQueues()
    engine = FakeEngine(room.deliver)
    edge = edge_of(engine, room)
    edge.accept()
    answers = _probes(edge)
    assert [answers[path]()[0] for path in ("/livez", "/readyz")] == [200, 200]
    engine.failure = "the device is gone"
    assert [answers[path]()[0] for path in ("/livez", "/readyz")] == [503, 503]


def test_the_probe_says_that_the_engine_sleeps():
    control = SimpleNamespace(unready_reason="")
    room = OutputQueues()
    edge = edge_of(FakeEngine(room.deliver), room)
    edge.backend = dataclasses.replace(edge.backend, control=control)
    edge.accept()
    answers = _probes(edge)
    assert answers["/readyz"]() == (200, "SERVER_STATE_READY\n")
    control.unready_reason = "the engine sleeps until Wake is called"
    assert answers["/readyz"]() == (503, "SERVER_STATE_READY the engine sleeps until Wake is called\n")
    assert answers["/livez"]()[0] == 200


def test_a_stopping_server_logs_one_line(caplog):
    with running() as server, caplog.at_level(logging.INFO):
        caplog.clear()  # of the start's lines, if an earlier test has left the level at INFO
        server.stop()
    lines = [record for record in caplog.records if record.name == "meshserve.runtime.server.lifecycle"]
    assert [line.getMessage() for line in lines] == [f"stopping; open requests: 0, grace period: {WAIT_SECONDS:g} s"]


def test_metrics_and_probes_of_a_server_without_an_engine_yet():
    """While it starts, every counter is there; the engine's gauges come with the engine."""
    edge, told, may_end = Edge(OutputQueues()), threading.Event(), threading.Event()
    found: list[Any] = []

    def prepare() -> Any:
        told.set()
        assert may_end.wait(WAIT_SECONDS)
        raise ConfigError("it was only a test")

    def serve() -> None:
        with pytest.raises(ConfigError, match="only a test"):
            run_server(edge, Listen(http_port=port), prepare=prepare)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    thread = threading.Thread(target=serve)
    thread.start()
    assert told.wait(WAIT_SECONDS)
    for path in ("/livez", "/readyz", "/metrics"):
        found.append(get(port, path))
    may_end.set()
    thread.join(WAIT_SECONDS)
    assert [status for status, _ in found] == [200, 503, 200]
    assert "SERVER_STATE_STARTING" in found[1][1]
    lines = found[2][1].splitlines()
    assert 'meshserve_requests_total{method="Generate",outcome="stop"} 0.0' in lines and "meshserve_ready 0.0" in lines
    assert not any(line.startswith(("meshserve_kv_pages", "meshserve_info")) for line in lines)


def test_every_refusal_code_of_the_interceptor_has_a_series():
    refusals = (UnauthenticatedError, PermissionDeniedError, QuotaExceededError, QueueFullError, EngineStoppedError)
    codes = {GRPC_STATUS[kind].name.lower() for kind in refusals}
    assert codes | {"internal"} == set(REFUSAL_CODES)
    methods = {method.removeprefix(f"/{SERVICE_NAME}/").removeprefix("/vllm.grpc.engine.") for method in QUEUED_METHODS}
    assert methods == {method.replace("VllmEngine.", "VllmEngine/") for method in METHODS}
