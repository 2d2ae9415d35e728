"""Hostile constraints: each costs its own caller, and no other."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from meshserve.protos import inference_pb2_grpc as pb_grpc
from tests.hostile.corpus import CORPUS, random_constraint
from tests.hostile.floods import generate
from tests.hostile.served import MAX_WORKER_BYTES, Served, bearer
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode
_NUM_CALLERS = 8


@pytest.mark.parametrize("name", CORPUS)
def test_a_constraint_costs_its_own_caller(served: Served, name: str):
    constraint, words = CORPUS[name]
    request = generate(max_tokens=60, temperature=1.0, n=4, ignore_eos=True, constraint=constraint)
    with served.under_attack(name), grpc.insecure_channel(served.target) as channel:
        call = pb_grpc.InferenceServiceStub(channel).Generate(
            request, metadata=bearer("attacker"), timeout=WAIT_SECONDS
        )
        try:
            list(call)
        except grpc.RpcError:
            assert call.code() in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED), (call.code(), call.details())
        if words is not None:
            assert call.code() is Code.INVALID_ARGUMENT and words in call.details(), (call.code(), call.details())


async def compile_all(target: str, seeds: Iterator[int], max_tokens: int = 3) -> Counter[str]:
    """Sends requests with random constraints. Returns how they end."""
    ends: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(target) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)

        async def caller() -> None:
            for seed in seeds:
                request = generate(max_tokens=max_tokens, temperature=1.0, seed=seed)
                request.sampling.constraint.CopyFrom(random_constraint(random.Random(seed)))
                call = stub.Generate(request, metadata=bearer("attacker"), timeout=WAIT_SECONDS)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED), (seed, error)
                ends[(await call.code()).name] += 1

        await asyncio.gather(*(caller() for _ in range(_NUM_CALLERS)))
    return ends


def test_workers_end_before_the_server_where_memory_runs_out(served: Served):
    """Each has a bound of its own, and is the first to be killed if all of them together are too much."""
    wait_for(served.workers)
    adjusted = {each: Path(f"/proc/{each}/oom_score_adj").read_text().strip() for each in served.workers()}
    assert set(adjusted.values()) == {"1000"}
    assert Path(f"/proc/{served.process.pid}/oom_score_adj").read_text().strip() != "1000"
    for each in adjusted:
        [data] = re.findall(r"^Max data size +(\d+) ", Path(f"/proc/{each}/limits").read_text(), re.MULTILINE)
        assert MAX_WORKER_BYTES < int(data) < 8 * MAX_WORKER_BYTES  # beside what it shares


def test_random_constraints(served: Served, num_constraints: int):
    with served.under_attack("random constraints"):
        ends = asyncio.run(compile_all(served.target, iter(range(num_constraints))))
    print(f"{ends.total()} constraints: {dict(ends)}")
    assert ends.total() == num_constraints and ends["OK"] > num_constraints / 3, ends
