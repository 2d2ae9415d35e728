"""Callers that mean harm, or know no better.

`make fuzz` sends 100,000 mutated requests, and 2,200 random ones to a real engine; a plain run sends a few.
"""

import asyncio
import gc
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.client.client import Client
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.inference_service import Backend, Edge
from meshserve.runtime.server.method_permissions import new_access
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.startup.launch import launch
from tests.runtime.loopback import Running, logged_errors, running, serving
from tests.waiting import WAIT_SECONDS, wait_for

METHODS = [
    method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # which would do what it is asked
]
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # 64 samples make tokens faster than a busy caller reads them
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(step_seconds=0.002) as server:
        yield server


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def assert_clean(server: Running) -> None:
    """No request, no mailbox, nothing of a quota is left."""
    wait_for(lambda: not server.engine.jobs and not server.room._by_request)
    assert server.room.num_open == 0
    assert all(usage.num_requests == usage.num_tokens == 0 for usage in server.edge.access._usage.values())


def assert_polite(server: Running) -> None:
    """Somebody with manners is served."""
    with Client(server.target) as client:
        assert client.complete("a", max_tokens=3, timeout_seconds=WAIT_SECONDS).token_ids == (98, 99, 100)


NUMBERS = [0, 1, 2, 5, 63, 64, 127, 128, 2**31 - 1, 2**31, 2**32 - 1]
TEXTS = ["", "a", "x" * 50, "x" * 300, "\x00", "é", "<|im_end|>", "\n", "user"]


def random_value(draw: random.Random, field: FieldDescriptor, depth: int) -> Any:
    if field.message_type is not None:
        return random_message(draw, field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(TEXTS)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw.choice([0.0, -1.0, 0.5, 1.0, 1e308, float("nan"), float("inf"), 5e-324])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    number = draw.choice(NUMBERS)
    if field.type == FieldDescriptor.TYPE_INT32:
        return draw.choice([1, -1]) * min(number, 2**31 - 1)
    return number | (draw.choice([0, 2**63]) if field.type == FieldDescriptor.TYPE_UINT64 else 0)


def random_message(draw: random.Random, descriptor: Any, depth: int = 0) -> Any:
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw.random() < 0.4 or depth > 3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(draw.choice([0, 1, 2, 20])):
                getattr(message, field.name)[random_value(draw, key, depth)] = random_value(draw, value, depth)
        elif field.is_repeated:
            values = [random_value(draw, field, depth) for _ in range(draw.choice([0, 1, 2, 20]))]
            if field.message_type is not None:
                getattr(message, field.name).extend(values)
            else:
                getattr(message, field.name)[:] = values
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(random_value(draw, field, depth))
        else:
            setattr(message, field.name, random_value(draw, field, depth))
    return message


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Half of the time as it is, else with bytes changed, lost or added."""
    changed = bytearray(data)
    if draw.random() < 0.5:
        return data
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(3)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.randrange(1, 4)]
        else:
            changed[at:at] = draw.randbytes(draw.choice([1, 2, 10]))
    return bytes(changed)


async def fuzz(target: str, num_requests: int) -> tuple[Counter, Counter]:
    """How the calls end: of impatient callers, of patient ones."""
    ends = Counter(), Counter()
    async with grpc.aio.insecure_channel(target) as channel:

        async def worker(seeds: Iterator[int]) -> None:
            for seed in seeds:
                draw = random.Random(seed)
                method = draw.choice(METHODS)
                data = mutated(draw, random_message(draw, method.input_type).SerializeToString())
                path = f"/{method.containing_service.full_name}/{method.name}"
                timeout_seconds = draw.choice([0.02, 0.2, WAIT_SECONDS])
                call = channel.unary_stream(path)(data, timeout=timeout_seconds)
                try:
                    async for _ in call:
                        if draw.random() < 0.1:
                            call.cancel()
                except (grpc.aio.AioRpcError, asyncio.CancelledError):
                    pass
                code = await call.code()
                if code is grpc.StatusCode.CANCELLED and call.cancelled():
                    code = grpc.StatusCode.OK
                ends[timeout_seconds == WAIT_SECONDS][code] += 1
                assert code in ALLOWED, (seed, path, code, await call.details())

        seeds = iter(range(num_requests))
        await asyncio.gather(*(worker(seeds) for _ in range(32)))
    return ends


def test_mutated_requests_get_the_status_they_deserve(server, caplog, pytestconfig):
    num_requests = pytestconfig.getoption("--fuzz")
    assert_polite(server)
    fds = num_fds()
    impatient, patient = asyncio.run(fuzz(server.target, num_requests))
    ends = impatient + patient
    print(f"{ends.total()} requests: {', '.join(f'{code.name} {count}' for code, count in ends.most_common())}")
    assert ends.total() == num_requests
    assert patient[grpc.StatusCode.INVALID_ARGUMENT] > patient.total() / 10
    assert_clean(server)
    assert_polite(server)
    gc.collect()
    wait_for(lambda: num_fds() <= fds + 4)  # a connection or two may still be closing
    assert logged_errors(caplog.records) == []


MODEL_VOCAB_SIZE = 2048
TOKEN_IDS = (0, 2, 300, 301, 500, MODEL_VOCAB_SIZE - 1)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
CONSTRAINTS = (
    {"json_schema": SCHEMA}, {"json_object": True}, {"regex": "[ab]{2,40}"}, {"regex": "(a|b)*c{300}"},
    {"choice": pb.Choice(texts=["yes", "no"])}, {"grammar": 'start: "x" start | "y"'},
)  # fmt: skip
# What a request to a real engine may ask for: mostly what is allowed, and the ends of each range.
SAMPLING: dict[str, Any] = {
    "max_tokens": (1, 2, 9, 60, 2**31 - 1, 2**32 - 1),
    "temperature": (0.0, 0.0, 1e-6, 0.7, 100.0),
    "top_k": (0, 1, 40, MODEL_VOCAB_SIZE, 2**31 - 1),
    "top_p": (5e-324, 1e-6, 0.5, 1.0),
    "min_p": (0.0, 0.1, 1.0),
    "frequency_penalty": (-2.0, 0.5, 2.0),
    "presence_penalty": (-2.0, 0.5, 2.0),
    "repetition_penalty": (0.01, 1.1, 100.0),
    "min_tokens": (0, 1, 30, 2**31 - 1),
    "logprobs": (0, 3, 20),
    "prompt_logprobs": (0, 3, 20),
    "seed": (0, 1, 2**63 - 1),
    "ignore_eos": (False, True),
    "include_stop": (False, True),
    "num_resumed_tokens": (0, 1, 5),
    "stop": (["e"], [" "], ["zzz" * 80], ["a" * n for n in range(1, 17)]),
    "stop_token_ids": ([2], [300], list(range(64))),
    "allowed_token_ids": ([300, 301, 302], [2], list(range(1024))),
    "bad_token_ids": ([300], [0, 2], list(range(1024))),
    "logit_bias": ({300: 100.0}, {2: 100.0}, {token_id: -100.0 for token_id in range(1024)}),
    "constraint": tuple(pb.Constraint(**kind) for kind in CONSTRAINTS),
}


def random_sampling(draw: random.Random) -> pb.SamplingParams:
    sampling = pb.SamplingParams()
    for name in draw.sample(sorted(SAMPLING), draw.choice([0, 1, 2, 3, 5, 8])):
        value = draw.choice(SAMPLING[name])
        if isinstance(value, dict):
            sampling.logit_bias.update(value)
        elif isinstance(value, list):
            getattr(sampling, name).extend(value)
        elif name == "constraint":
            sampling.constraint.CopyFrom(value)
        else:
            setattr(sampling, name, value)
    return sampling


def random_request(draw: random.Random) -> pb.GenerateRequest:
    """Some begin alike, some fill the context."""
    token_ids = [draw.choice(TOKEN_IDS[2:])] * draw.choice([1, 8, 40]) + draw.choices(TOKEN_IDS, k=draw.randrange(60))
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(token_ids=token_ids),
        sampling=random_sampling(draw),
        n=draw.choice([None, None, 1, 2, 9]),
        priority=draw.choice([None, -100, 100]),
        cache_salt=draw.choice([None, "a"]),
    )


async def ask_everything(target: str, num_requests: int) -> Counter:
    """How random requests to a real engine end, by status or by reason. A third of the callers do not wait for it."""
    ends: Counter = Counter()
    async with grpc.aio.insecure_channel(target) as channel:
        generate = pb_grpc.InferenceServiceStub(channel).Generate

        async def worker(seeds: Iterator[int]) -> None:
            for seed in seeds:
                draw = random.Random(seed)
                request, num_messages = random_request(draw), draw.choice([1, 5, 10**6, 10**6, 10**6])
                call = generate(request, timeout=draw.choice([0.1, WAIT_SECONDS, WAIT_SECONDS, WAIT_SECONDS]))
                reasons: list[int] = []
                try:
                    async for message in call:
                        num_messages -= 1
                        if message.HasField("finish"):
                            reasons.append(message.finish.reason)
                        if not num_messages:
                            call.cancel()
                except grpc.aio.AioRpcError as error:
                    assert error.code() in ALLOWED, (seed, error.code(), error.details())
                    ends[error.code().name] += 1
                except asyncio.CancelledError:
                    ends["CANCELLED"] += 1
                else:
                    assert len(reasons) == max(request.n, 1), seed
                    ends.update(map(pb.FinishReason.Name, reasons))

        seeds = iter(range(num_requests))
        await asyncio.gather(*(worker(seeds) for _ in range(16)))
    return ends


def test_random_requests_to_a_real_engine_leave_it_as_it_was(caplog, pytestconfig):
    num_requests = 200 + pytestconfig.getoption("--fuzz") // 50
    config = ServeConfig(
        model="demo", tp=2, cpu_devices=8, page_size=8, num_pages=64, max_running=8, max_step_tokens=32,
        max_context=128, draft_tokens=4, cache_dir="",
    )  # fmt: skip
    room = OutputQueues(max_undelivered_tokens=2**20)
    launched = launch(config, room.deliver)
    edge = Edge(room, access=new_access())
    edge.attach(Backend(launched.engine, launched.tokenizer, launched.info, launched.grammars))
    launched.engine.start()
    try:
        with serving(edge, room) as server, Client(server.target) as client:

            def polite() -> tuple[int, ...]:
                prompt = "The wind blows over the hill"
                return client.complete(prompt, max_tokens=40, temperature=0.0, timeout_seconds=WAIT_SECONDS).token_ids

            before = polite()
            ends = asyncio.run(ask_everything(server.target, num_requests))
            print(", ".join(f"{name} {count}" for name, count in ends.most_common()))
            wait_for(lambda: room.num_open == 0 and not room._by_request)
            load = launched.engine.load()
            assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)
            assert polite() == before and edge.failure is None
            assert ends["FINISH_REASON_LENGTH"] > num_requests / 5, "most of them reach the engine"
    finally:
        launched.engine.stop()
    assert logged_errors(caplog.records) == []


READS_NONE = """
import sys, grpc
from meshserve.protos import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
channel = grpc.insecure_channel(sys.argv[1])
stub = pb_grpc.InferenceServiceStub(channel)
request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1_000_000))
calls = [stub.Generate(request) for _ in range(int(sys.argv[2]))]
print("open", flush=True)
sys.stdin.read()
"""


def test_hundreds_of_streams_that_nobody_reads(pytestconfig):
    """A thousand with --fuzz. The client process is frozen, so that not even its gRPC library reads."""
    num_streams = 1000 if pytestconfig.getoption("--fuzz") > 10_000 else 200
    options = {"text": lambda token_id: "x" * 2_000, "max_undelivered_tokens": 100}
    with running(**options) as server:
        assert_polite(server)
        fds = num_fds()
        command = [sys.executable, "-c", READS_NONE, server.target, str(num_streams)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            with server.engine.holding(1_000_000):
                assert process.stdout is not None and process.stdout.readline() == "open\n"
                wait_for(lambda: server.engine.num_submits == num_streams + 1)
                process.send_signal(signal.SIGSTOP)
                assert_polite(server)
                assert len(server.engine.jobs) == num_streams, "served while all of them hang"
            wait_for(lambda: not server.engine.jobs)  # each lost its request when 100 tokens waited
            assert_polite(server)
            assert {reason for _, reason in server.engine.cancels} == {FinishReason.CANCELLED}
        finally:
            process.kill()
            process.wait()
        assert_clean(server)
        assert_polite(server)
        gc.collect()
        wait_for(lambda: num_fds() <= fds + 4)


def test_100_megabytes_are_refused(server):
    with grpc.insecure_channel(server.target, options=[("grpc.max_send_message_length", -1)]) as channel:
        for size, code in (
            (100 * 10**6, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (10**7, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            request = pb.GenerateRequest(text="a" * size)
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.unary_stream("/meshserve.v1.InferenceService/Generate")(request.SerializeToString()))
            assert caught.value.code() is code
    assert_polite(server)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
GARBAGE = [
    b"", b"GET / HTTP/1.1\r\n\r\n", PREFACE, PREFACE[:10], PREFACE + SETTINGS, PREFACE + SETTINGS + b"\xff" * 100,
    PREFACE + SETTINGS + b"\x00\x00\x04\x01\x05\x00\x00\x00\x01\xff\xff\xff\xff", b"\x16\x03\x01" + b"\x00" * 50,
]  # fmt: skip


def test_half_closed_and_reset_connections(server):
    fds = num_fds()
    host, port = server.target.split(":")
    draw = random.Random(0)
    for round_index in range(200):
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as sock:
            sock.sendall(GARBAGE[round_index % len(GARBAGE)])
            if draw.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
            else:  # a reset instead of a farewell
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_polite(server)
    assert_clean(server)
    wait_for(lambda: num_fds() <= fds + 4)


def test_a_client_that_dies_in_the_middle(server):
    command = [sys.executable, "-c", READS_NONE, server.target, "50"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    wait_for(lambda: len(server.engine.jobs) == 50)
    process.kill()
    process.wait()
    assert_clean(server)
    assert_polite(server)
