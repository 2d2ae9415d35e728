"""Mutated and random requests of every RPC to a real server.

`make fuzz` sends 100,000 mutated requests and 2,020 valid ones; a plain run sends a few.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator

import grpc
from smg_grpc_proto import vllm_engine_pb2

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from tests.hostile import mutations
from tests.hostile.floods import ALLOWED
from tests.hostile.served import Served, bearer
from tests.waiting import WAIT_SECONDS

_NUM_CALLERS = 32
# Mostly a tenant with a quota. Only administrators may call AdminService.
_TENANTS = ("attacker",) * 8 + ("operator", "")


async def mutated(target: str, num_requests: int, methods: Iterable = mutations.METHODS) -> tuple[Counter, Counter]:
    """Sends mutated requests. Returns how the calls of impatient callers end, and those of patient ones."""
    ends = Counter(), Counter()
    methods = list(methods)
    async with grpc.aio.insecure_channel(target) as channel:

        async def caller(seeds: Iterator[int]) -> None:
            for seed in seeds:
                draw = random.Random(seed)
                path, data = mutations.random_call(draw, methods)
                timeout_seconds = draw.choice([0.02, 0.2, WAIT_SECONDS])
                call = channel.unary_stream(path)(data, timeout=timeout_seconds, metadata=bearer(draw.choice(_TENANTS)))
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
        await asyncio.gather(*(caller(seeds) for _ in range(_NUM_CALLERS)))
    return ends


def test_mutated_requests_get_the_status_they_deserve(served: Served, num_requests: int):
    with served.under_attack("mutated requests"):
        impatient, patient = asyncio.run(mutated(served.target, num_requests))
    ends = impatient + patient
    print(f"{ends.total()} requests: {', '.join(f'{code.name} {count}' for code, count in ends.most_common())}")
    assert ends.total() == num_requests
    assert patient[grpc.StatusCode.INVALID_ARGUMENT] > patient.total() / 10


def test_mutated_requests_to_the_gateway_port(served: Served, num_requests: int):
    methods = mutations.methods_of(vllm_engine_pb2)
    with served.under_attack("mutated requests to the gateway port"):
        impatient, patient = asyncio.run(mutated(served.gateway, num_requests // 4, methods))
    ends = impatient + patient
    print(f"{ends.total()} requests: {', '.join(f'{code.name} {count}' for code, count in ends.most_common())}")


async def ask_everything(target: str, num_requests: int) -> Counter:
    """Sends valid requests. Returns how they end, by status or reason; a third of the callers do not wait for it."""
    ends: Counter = Counter()
    async with grpc.aio.insecure_channel(target) as channel:
        generate = pb_grpc.InferenceServiceStub(channel).Generate

        async def caller(seeds: Iterator[int]) -> None:
            for seed in seeds:
                draw = random.Random(seed)
                request, num_messages = mutations.random_request(draw), draw.choice([1, 5, 10**6, 10**6, 10**6])
                timeout_seconds = draw.choice([0.1, WAIT_SECONDS, WAIT_SECONDS, WAIT_SECONDS])
                call = generate(request, timeout=timeout_seconds, metadata=bearer("crowd"))
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
        await asyncio.gather(*(caller(seeds) for _ in range(16)))
    return ends


def test_random_requests_to_the_engine(served: Served, num_requests: int):
    number = 20 + num_requests // 50
    with served.under_attack("random requests"):
        ends = asyncio.run(ask_everything(served.target, number))
    print(", ".join(f"{name} {count}" for name, count in ends.most_common()))
    assert ends["FINISH_REASON_LENGTH"] > number / 5, "most of them reach the engine"
