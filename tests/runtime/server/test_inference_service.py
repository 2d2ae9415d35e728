import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import (
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedModelError,
)
from meshserve.runtime.api.request import FinishReason, Load
from meshserve.runtime.client.client import AsyncClient, CallError, Client, Usage, call_errors
from meshserve.runtime.client.messages import constraint_message
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen, ServerHandle, run_server
from meshserve.runtime.server.method_permissions import SERVICE_NAME
from meshserve.runtime.server.output_queue import OutputQueues
from tests.runtime.loopback import INFO, VOCAB_SIZE, FakeEngine, Job, Letters, Running, edge_of, logged_errors, running
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client


def health_of(target: str, service: str = "") -> int:
    with grpc.insecure_channel(target) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], "x" * 40 + "c"])
def test_a_stream_brings_every_token_once_and_one_finish(client, prompt):
    chunks = list(client.generate(prompt, max_tokens=20))
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert token_ids == list(range(100, 120))
    assert "".join(chunk.text for chunk in chunks) == "".join(f"{token_id} " for token_id in token_ids)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish.reason is FinishReason.LENGTH
    assert chunks[-1].finish.usage == Usage(num_prompt_tokens=len(prompt), num_output_tokens=20)


def test_a_chat_is_rendered_and_streamed(server, client):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chunks = list(client.chat(messages, max_tokens=5))
    prompt = "system: be brief\nuser: hi\n"
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [
        11,
        12,
        13,
        14,
        15,
    ]  # after "\n", which is 10
    assert chunks[-1].finish.usage == Usage(num_prompt_tokens=len(prompt), num_output_tokens=5)
    [last] = client.chat(messages, max_tokens=1, enable_thinking=False)
    assert last.finish.usage.num_prompt_tokens == len(prompt + "no thinking\n")


@pytest.mark.parametrize(
    ("messages", "field_name", "words"),
    [
        ([], "messages", "got none"),
        ([{"content": "a"}], "messages[0].role", "has 0 characters"),
        (
            [{"role": "user", "content": "a"}, {"role": "r" * 65, "content": ""}],
            "messages[1].role",
            "has 65 characters",
        ),
        ([{"role": "user", "content": "a" * 60}], "messages", "has 67 tokens; this server accepts 63"),
        ([{"role": "alien", "content": "a"}], "messages", "refused them"),
    ],
)
def test_chats_that_are_refused(server, client, messages, field_name, words):
    num_submits = server.engine.num_submits
    with pytest.raises(CallError, match=words) as caught:
        list(client.chat(messages))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field_name)
    assert server.engine.num_submits == num_submits


@pytest.mark.parametrize(
    ("constraint", "field_name", "words"),
    [
        ({"regex": "(a"}, "sampling.constraint.regex", "unclosed group"),
        ({"json_schema": {"not": {}}}, "sampling.constraint.json_schema", r'Unimplemented keys: \["not"\]'),
        ({"grammar": "a" * 65_537}, "sampling.constraint.grammar", "got 65537 characters; allowed is 65536"),
        ({"json_object": False}, "sampling.constraint.json_object", "got false; set it to true"),
        ({"regex": ""}, "sampling.constraint.regex", "got an empty text"),
        ({"choice": []}, "sampling.constraint.choice", "got 0 choices"),
    ],
)
def test_constraints_that_are_refused(client, constraint, field_name, words):
    with pytest.raises(CallError, match=words) as caught:
        list(client.generate("a", constraint=constraint))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field_name)


def test_a_constraint_reaches_the_engine_compiled(server, client):
    client.complete("a", max_tokens=1, constraint={"choice": ["x", "y"]})
    client.complete("a", max_tokens=1, constraint={"choice": ["x", "y"]})
    first, second = server.engine.grammars[-2:]
    assert first.compiled is second.compiled and not first.mask.all()
    client.complete("a", max_tokens=1)
    assert server.engine.grammars[-1] is None


def test_a_constraint_that_says_nothing_is_refused(server):
    with pytest.raises(ValueError, match="exactly one"):
        constraint_message({"regex": "a", "json_object": True})
    with grpc.insecure_channel(server.target) as channel, pytest.raises(CallError, match="set one of") as caught:
        stub = pb_grpc.InferenceServiceStub(channel)
        sampling = pb.SamplingParams(constraint=pb.Constraint())
        with call_errors():
            list(stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "sampling.constraint")


def test_a_stop_token_outside_the_vocabulary_is_refused(client):
    with pytest.raises(CallError, match="token 1 is 128; allowed is 0 to 127") as caught:
        list(client.generate("a", stop_token_ids=[3, 128]))
    assert caught.value.field == "sampling.stop_token_ids"


TALK = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "options", "field_name", "words"),
    [
        ([TALK], {"tools": ["{"]}, "tools[0]", "is not JSON"),
        ([TALK], {"tools": [{"type": "function"}, "[1]"]}, "tools[1]", "is JSON of type list; allowed is an object"),
        ([TALK], {"tools": ["{}"] * 129}, "tools", "got 129; allowed are 128"),
        ([TALK] * 65, {}, "messages", "got 65; allowed are 64"),
        ([SAID | {"tool_calls": [{"name": "f", "arguments": {}}] * 129}], {}, "messages[0].tool_calls", "got 129;"),
        ([TALK], {"tools": ['{"a": "' + "x" * 20_000 + '"}']}, "messages", "characters; allowed are"),
        ([TALK], {"continue_last_message": True}, "continue_last_message", "the last message has role 'user'"),
        (
            [TALK, SAID | {"content": " "}],
            {"continue_last_message": True},
            "continue_last_message",
            "1 characters",
        ),
        (
            [TALK, SAID | {"tool_calls": [{"name": "f", "arguments": {}}]}],
            {"continue_last_message": True},
            "continue_last_message",
            "1 tool calls",
        ),
        (
            [TALK, SAID],
            {"continue_last_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "allowed is one of them",
        ),
        ([SAID | {"tool_calls": [{"name": "", "arguments": {}}]}], {}, "messages[0].tool_calls[0].name", "is empty"),
        ([SAID | {"tool_calls": [{"name": "f", "arguments": "1"}]}], {}, "messages[0].tool_calls[0].arguments", "int"),
    ],
)
def test_options_of_a_chat_that_are_refused(client, messages, options, field_name, words):
    with pytest.raises(CallError, match=words) as caught:
        list(client.chat(messages, **options))
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field_name)


def test_options_of_a_chat_reach_the_template(client):
    def num_rendered(messages, **options):
        [last] = client.chat(messages, max_tokens=1, **options)
        return last.finish.usage.num_prompt_tokens

    text = "user: a\nassistant: b\n"
    assert num_rendered([TALK, SAID], add_generation_prompt=False) == len(text + "add=False\n")
    assert num_rendered([TALK, SAID], continue_last_message=True) == len(text + "add=False\ncon=True\n")
    assert num_rendered([TALK, SAID], tools=[{"n": 1}]) == len(text + "too=[{'n': 1}]\n")


def test_a_model_without_a_chat_template_says_so(client, monkeypatch):
    def render_chat(self, messages, **options):
        raise UnsupportedModelError("no chat template")

    monkeypatch.setattr(Letters, "render_chat", render_chat)
    with pytest.raises(CallError, match="no chat template") as caught:
        list(client.chat([{"role": "user", "content": "a"}]))
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_model_info_and_load(client):
    assert client.model_info() == INFO
    assert client.load() == Load(num_running=0, num_waiting=1, num_pages=100, num_free_pages=90)


def test_leaving_the_stream_cancels_the_request(server, client):
    for chunk in client.generate("a", max_tokens=100_000, request_id="left"):
        assert chunk.finish is None
        break
    wait_for(lambda: ("left", FinishReason.CANCELLED) in server.engine.cancels)
    wait_for(lambda: "left" not in server.room._by_request)  # its last output has come
    assert client.complete("a", max_tokens=2, request_id="left").token_ids == (98, 99)  # the id is free again


def test_a_deadline_that_the_engine_gives_up_on_is_the_status(server, client):
    stream = client.generate([65], max_tokens=10_000)
    next(stream)
    server.engine.end(FinishReason.DEADLINE, "it could not be met any more")
    with pytest.raises(CallError, match="could not be met") as caught:
        list(stream)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


def test_a_deadline_ends_the_request(server, client):
    """A busy machine may need longer to submit it, or hear of the caller's end long before its own clock tells."""
    for attempt in range(9):
        with pytest.raises(CallError) as caught:
            client.complete("a", max_tokens=1_000_000, request_id=f"late {attempt}", timeout_seconds=0.2 * 2**attempt)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        wait_for(lambda: not server.engine.jobs)
        if FinishReason.DEADLINE in [reason for name, reason in server.engine.cancels if name.startswith("late")]:
            return
    raise AssertionError(server.engine.cancels)


def test_request_ids_are_unique_among_open_requests(client):
    stream = client.generate("a", max_tokens=100_000, request_id="twin")
    next(stream)
    with pytest.raises(CallError, match="'twin' belongs to a request that has not ended") as caught:
        client.complete("a", request_id="twin")
    assert caught.value.code is Code.ALREADY_EXISTS
    stream.close()


def request(**message: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(**message.pop("sampling", {}))
    return pb.GenerateRequest(**({"text": "a"} | message), sampling=sampling)


INVALID = {
    "no prompt": (pb.GenerateRequest(), "prompt", "neither text nor token_ids"),
    "empty text": (request(text=""), "text", "0 tokens"),
    "empty ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids", "0 tokens"),
    "bad id": (
        pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1, 128])),
        "token_ids",
        "token 1 is 128; allowed is 0",
    ),
    "too long": (request(text="a" * 64), "text", "has 64 tokens; this server accepts 63 .*--max-context"),
    "far too long": (request(text="a" * 10_000), "text", "has 10000 tokens"),
    "empty request_id": (request(request_id=""), "request_id", "1 to 128"),
    "long request_id": (request(request_id="a" * 129), "request_id", "129 characters"),
    "odd request_id": (request(request_id="a\nb"), "request_id", "printable"),
    "max_tokens": (request(sampling={"max_tokens": 0}), "sampling.max_tokens", "got 0; allowed is 1 or more"),
    "temperature": (request(sampling={"temperature": -1.0}), "sampling.temperature", "got -1.0"),
    "nan": (request(sampling={"temperature": float("nan")}), "sampling.temperature", "got nan"),
    "top_p": (request(sampling={"top_p": 0.0}), "sampling.top_p", "above 0"),
    "seed": (request(sampling={"seed": 2**63}), "sampling.seed", "0 to"),
    "stop": (request(sampling={"stop": [""]}), "sampling.stop", "1 to 256"),
    "stops": (request(sampling={"stop": ["a"] * 17}), "sampling.stop", "got 17 items"),
    "huge stop": (request(sampling={"stop": ["\u4e16" * 100_000]}), "sampling.stop", "got"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_name_the_field(server, name):
    message, field_name, words = INVALID[name]
    num_submits = server.engine.num_submits
    with grpc.insecure_channel(server.target) as channel, pytest.raises(CallError, match=words) as caught:
        with call_errors():
            list(pb_grpc.InferenceServiceStub(channel).Generate(message))
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == field_name
    assert server.engine.num_submits == num_submits


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (QueueFullError("1024 requests wait", retry_seconds=1.5), Code.RESOURCE_EXHAUSTED, "1024 requests wait"),
        (InvalidRequestError("prompt", "too long for the pages"), Code.INVALID_ARGUMENT, "too long for the pages"),
        (EngineStoppedError("stopped"), Code.UNAVAILABLE, "stopped"),
        (KeyError("a secret"), Code.INTERNAL, "internal error .KeyError."),
    ],
)
def test_the_engines_refusals_become_statuses(server, client, monkeypatch, error, code, words):
    monkeypatch.setattr(server.engine, "submit_error", error)
    with pytest.raises(CallError, match=words) as caught:
        client.complete("a", request_id="refused")
    assert caught.value.code is code
    assert "secret" not in str(caught.value)
    assert caught.value.retry_seconds == (1.5 if code is Code.RESOURCE_EXHAUSTED else None)
    monkeypatch.undo()
    assert client.complete("a", request_id="refused", max_tokens=1).token_ids == (98,)


@pytest.mark.parametrize("method", ["Generate", "Chat"])
def test_a_full_queue_refuses_a_request_before_it_is_read(server, client, monkeypatch, method):
    monkeypatch.setattr(server.engine, "is_full", True)
    num_submits = server.engine.num_submits
    num_refused = server.counted("meshserve_refused_calls_total", code="resource_exhausted")
    with grpc.insecure_channel(server.target) as channel, pytest.raises(CallError, match="9 requests wait") as caught:
        with call_errors():
            list(channel.unary_stream(f"/{SERVICE_NAME}/{method}")(b"\xff no message of ours"))
    assert caught.value.code is Code.RESOURCE_EXHAUSTED and caught.value.retry_seconds == 2.5
    assert server.counted("meshserve_refused_calls_total", code="resource_exhausted") == num_refused + 1
    with grpc.insecure_channel(server.target) as channel:  # what takes no place is served
        answer = pb_grpc.InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest(text="abc"))
    assert list(answer.token_ids) == [97, 98, 99]
    monkeypatch.undo()
    assert client.complete("a", max_tokens=1).token_ids == (98,)
    assert server.engine.num_submits == num_submits + 1


def test_an_idle_engine_is_held_until_the_request_that_arrives_is_submitted():
    with running(can_be_held=True) as server, Client(server.target) as client:
        list(client.generate([7, 8, 9], max_tokens=2))
        assert server.engine.holds == [(True, 0), (False, 1)]


def test_a_draining_server_does_not_speak_of_its_queue(monkeypatch):
    with running() as server, Client(server.target) as client:
        monkeypatch.setattr(server.engine, "is_full", True)
        server.edge.refuse("the server is stopping")
        with pytest.raises(CallError, match="is stopping") as caught:
            client.complete("a")
        assert caught.value.code is Code.UNAVAILABLE


def test_a_live_engine_ends_a_request_with_its_reason(server, client):
    stream = client.generate("a", max_tokens=100_000)
    next(stream)
    server.engine.end(FinishReason.ERROR, "the cache is corrupt")
    with pytest.raises(CallError, match="the cache is corrupt"):
        list(stream)
    stream = client.generate("a", max_tokens=100_000)
    next(stream)
    server.engine.end(FinishReason.CANCELLED, "")
    assert list(stream)[-1].finish.reason is FinishReason.CANCELLED


def test_a_dead_engine_ends_every_stream_and_the_server():
    with running(listen=Listen(status_seconds=WAIT_SECONDS)) as server, Client(server.target) as client:
        streams = [client.generate("a", max_tokens=100_000) for _ in range(3)]
        for stream in streams:
            next(stream)
        server.engine.failure = "XlaRuntimeError: out of memory"
        for stream in streams:
            with pytest.raises(CallError, match="the engine failed: XlaRuntimeError: out of memory") as caught:
                list(stream)
            assert caught.value.code is Code.UNAVAILABLE
        server.join()
        assert [type(error) for error in server.errors] == [EngineStoppedError]  # uncaught: the process exits with 1


def test_a_slow_reader_loses_the_request_and_nobody_else_does():
    wide = 20_000
    options = {"max_undelivered_tokens": 20, "step_seconds": 0.0005}
    with running(text=lambda token_id: "x" * wide, **options) as server, Client(server.target) as client:
        slow = client.generate("a", max_tokens=100_000, request_id="slow")
        with server.engine.holding(100_000):
            next(slow)
        wait_for(lambda: ("slow", FinishReason.CANCELLED) in server.engine.cancels)
        assert client.complete("a", max_tokens=5).text == "x" * wide * 5
        with pytest.raises(CallError, match="this server keeps at most 20") as caught:
            list(slow)
        assert caught.value.code is Code.RESOURCE_EXHAUSTED


def test_a_caller_that_never_reads_and_then_vanishes_leaves_nothing_behind(caplog):
    options = {"max_undelivered_tokens": 20, "step_seconds": 0.0005}
    listen = Listen(drain_seconds=2 * WAIT_SECONDS)
    with running(text=lambda token_id: "x" * 20_000, listen=listen, **options) as server:
        for _ in range(2):  # the second time with the id of the first
            with Client(server.target) as client:
                stuck = client.generate("a", max_tokens=100_000, request_id="stuck")
                with server.engine.holding(100_000):
                    next(stuck)
                wait_for(lambda: ("stuck", FinishReason.CANCELLED) in server.engine.cancels)
                wait_for(lambda: server.room.num_open == 0)
            wait_for(lambda: not server.room._by_request)  # the handler has also left
            assert server.engine.ends == ["stuck"]
            server.engine.ends.clear()
            server.engine.cancels.clear()
        with Client(server.target) as client:
            both = ("stuck", "other")
            stuck, other = (client.generate("a", max_tokens=100_000, request_id=name) for name in both)
            with server.engine.holding(100_000):
                next(stuck), next(other)
            # A request is cancelled by the limit and again as its handler leaves; the second one some 30 ms later.
            wait_for(lambda: {name for name, _ in server.engine.cancels} == set(both))
            server.stop()  # well before the drain would end: it does not wait for callers that do not read
            assert sorted(server.engine.ends) == sorted(both)
    assert logged_errors(caplog.records) == []


def test_stopping_lets_running_requests_end():
    with running() as server, Client(server.target) as client:
        stream = client.generate("a", max_tokens=100)
        with server.engine.holding(100):
            next(stream)
            server.handle.request_stop()
            wait_for(lambda: health_of(server.target) == NOT_SERVING)
            assert health_of(server.target, SERVICE_NAME) == NOT_SERVING
            with pytest.raises(CallError, match="the server is stopping") as caught:
                client.complete("a")
            assert caught.value.code is Code.UNAVAILABLE
        assert list(stream)[-1].finish.usage.num_output_tokens == 100
        server.join()
        assert server.errors == []


def test_a_signal_after_a_request_to_drain_is_the_first():
    """A preStop hook drains, the orchestrator sends its signal after it; in a cluster every process gets one."""
    with running() as server, Client(server.target) as client:
        stream = client.generate("a", max_tokens=100)
        with server.engine.holding(100), grpc.insecure_channel(server.target) as channel:
            next(stream)
            pb_grpc.AdminServiceStub(channel).Drain(pb.DrainRequest(grace_seconds=WAIT_SECONDS))
            server.handle.request_stop()
            wait_for(lambda: server.handle._num_stops == 1)
            assert server.handle.is_stopping and not server.handle.is_forced
            assert server.thread.is_alive()
        assert list(stream)[-1].finish.usage.num_output_tokens == 100
        server.join()
        assert server.errors == []


def test_stopping_does_not_wait_for_ever():
    with (
        running(listen=Listen(drain_seconds=0.2, status_seconds=WAIT_SECONDS)) as server,
        Client(server.target) as client,
    ):
        stream = client.generate("a", max_tokens=100_000)
        next(stream)
        server.stop()
        with pytest.raises(CallError, match="stopped before the request could end") as caught:
            list(stream)
        assert caught.value.code is Code.UNAVAILABLE
        assert len(server.engine.cancels) == 1 and server.errors == []


def test_sigterm_drains(capfd):
    room = OutputQueues()
    engine = FakeEngine(room.deliver)
    got: list[Any] = []

    def caller(port: int) -> None:
        with Client(f"127.0.0.1:{port}") as client:
            for chunk in client.generate("a", max_tokens=30):
                if not got:
                    os.kill(os.getpid(), signal.SIGTERM)
                got.append(chunk)

    def on_ready(handle: ServerHandle) -> None:
        threads.append(threading.Thread(target=caller, args=(handle.port,)))
        threads[-1].start()

    threads = [threading.Thread(target=engine.run)]
    threads[0].start()
    edge = edge_of(engine, room)
    run_server(edge, Listen(host="localhost", drain_seconds=WAIT_SECONDS), on_ready=on_ready)
    engine.is_running = False
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert got[-1].finish.usage.num_output_tokens == 30
    assert "meshserve listens on localhost:" in capfd.readouterr().out


def test_many_streams_with_random_cancels_end_once_each(caplog):
    """Half of the impatient callers leave streams that stand still, the others leave if they are in time."""
    sizes = {str(seed): random.Random(seed).choices(range(1, 90), k=3) for seed in range(64)}
    impatient = {name for name, (_, max_tokens, patience) in sizes.items() if patience < max_tokens}
    held = set(sorted(impatient)[::2])

    async def one(client: AsyncClient, name: str) -> str:
        start, max_tokens, patience = sizes[name]
        token_ids: list[int] = []
        stream = client.generate([start], max_tokens=max_tokens, request_id=name)
        finishes = 0
        async for chunk in stream:
            token_ids += chunk.token_ids
            finishes += chunk.finish is not None
            if len(token_ids) >= patience and not finishes:
                await stream.aclose()
                break
        assert token_ids == [(start + 1 + i) % VOCAB_SIZE for i in range(len(token_ids))]
        assert not finishes or (finishes == 1 and len(token_ids) == max_tokens)
        return "finished" if finishes else "left"

    async def main(target: str) -> list[str]:
        async with AsyncClient(target) as client:
            await client.wait_until_ready(WAIT_SECONDS)
            return await asyncio.gather(*(one(client, name) for name in sizes))

    def is_held(job: Job) -> bool:
        return job.request_id in held and job.num_output >= sizes[job.request_id][2]

    with running(is_held=is_held) as server:
        outcomes = dict(zip(sizes, asyncio.run(main(server.target)), strict=True))
        assert {outcomes[name] for name in held} == {"left"} and len(held) > 10
        assert {outcomes[name] for name in sizes.keys() - impatient} == {"finished"}
        wait_for(lambda: len(server.engine.ends) == 64 and server.room.num_open == 0 and not server.engine.jobs)
        assert server.engine.num_submits == 64
        assert len(set(server.engine.ends)) == 64
        with Client(server.target) as client:
            assert client.complete("a", max_tokens=1).token_ids == (98,)
    assert logged_errors(caplog.records) == []


def test_health_and_refusal_until_the_engine_is_prepared(capfd):
    room = OutputQueues()
    engine = FakeEngine(room.deliver)
    go, ready, handles = threading.Event(), threading.Event(), []
    edge = Edge(room)

    def prepare() -> Backend:
        edge.progress = "compiling the programs"
        assert go.wait(WAIT_SECONDS)
        threading.Thread(target=engine.run).start()
        return Backend(engine, Letters(), INFO)

    def on_ready(handle: ServerHandle) -> None:
        handles.append(handle)
        ready.set()

    options = {"prepare": prepare, "on_ready": on_ready}
    thread = threading.Thread(target=run_server, args=(edge, Listen(drain_seconds=0.0)), kwargs=options)
    thread.start()
    said: list[str] = []
    wait_for(lambda: said.append(capfd.readouterr().out) or "listens on" in "".join(said))
    target = "".join(said).split()[-1]
    with Client(target, ready_seconds=0) as client:
        assert health_of(target) == health_of(target, SERVICE_NAME) == NOT_SERVING
        with pytest.raises(CallError, match="the server is starting.*compiling the programs"):
            client.complete("a")
        with pytest.raises(CallError, match="UNAVAILABLE: the server is starting"):
            client.model_info()
        with grpc.insecure_channel(target) as channel:
            info = pb_grpc.InferenceServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
        assert (info.state, info.progress) == (pb.SERVER_STATE_STARTING, "compiling the programs")
        with pytest.raises(CallError, match="not ready within 0.2 s"):
            client.wait_until_ready(0.2)
        go.set()
        client.wait_until_ready(WAIT_SECONDS)
        assert health_of(target) == SERVING
        assert client.complete("a", max_tokens=2).token_ids == (98, 99)
    assert ready.wait(WAIT_SECONDS)
    handles[0].request_stop()
    thread.join(WAIT_SECONDS)
    engine.is_running = False
    assert not thread.is_alive()


def test_a_failure_to_prepare_ends_the_server():
    def prepare() -> None:
        raise ConfigError("no memory is left for the KV cache")

    room = OutputQueues()
    edge = edge_of(FakeEngine(room.deliver), room)
    with pytest.raises(ConfigError, match="no memory is left"):
        run_server(edge, Listen(), prepare=prepare)


def test_addresses_that_are_refused(server):
    room = OutputQueues()
    edge = edge_of(FakeEngine(room.deliver), room)
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.com", ""):
        with pytest.raises(ConfigError, match="--allow-insecure"):
            run_server(edge, Listen(host=host))
    with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{server.handle.port}"):
        run_server(edge, Listen(port=server.handle.port))
    with pytest.raises(ConfigError, match=f"cannot bind localhost:{server.handle.port}"):  # its other address is free
        run_server(edge, Listen(host="localhost", port=server.handle.port))


def buf() -> str:
    found = shutil.which("buf", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip("buf is not installed")
    return found


def test_buf_curl_finds_the_service_by_reflection(server):
    def curl(*args: str) -> str:
        command = [buf(), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS).stdout

    address = f"http://{server.target}"
    assert SERVICE_NAME in curl(address, "--list-services").split()
    body = json.dumps({"text": "a", "sampling": {"maxTokens": 3, "temperature": 0}})
    out = curl(f"{address}/{SERVICE_NAME}/Generate", "-d", body)
    decoder, messages = json.JSONDecoder(), []
    while out := out.lstrip():
        message, end = decoder.raw_decode(out)
        messages.append(message)
        out = out[end:]
    assert "".join(message.get("text", "") for message in messages) == "98 99 100 "
    assert messages[-1]["finish"] == {
        "reason": "FINISH_REASON_LENGTH",
        "usage": {"numPromptTokens": 1, "numOutputTokens": 3},
    }
