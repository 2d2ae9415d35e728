"""Four times the load that a server can take: it serves nearly as much as at most, and refuses the rest at once.

A closed loop of callers keeps every slot busy, which gives the server's maximum rate. Then callers arrive at four times
that rate, whether or not earlier ones have been served, so the queue fills and requests are refused. Rounds of both
alternate, because other work on a machine changes the maximum: each overload is compared with the closed loops right
before and after it.

Server and callers have one core each: the callers of a real server do not run on its cores, and a refused caller needs
about as much processor time as the refusal itself.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from meshserve.runtime.client.client import AsyncClient, CallError
from tests.hostile.served import Served, serving

MIN_GOODPUT = 0.8  # tokens that callers received, as a share of the maximum; 0.90 to 0.94 were measured
MAX_REFUSAL_SECONDS = 0.05  # for 99 of 100 refusals; 6 ms were measured
MAX_MEMORY_GROWTH = 0.05  # of the server, from the first overload to the last
_NUM_ROUNDS = 6
_OVERLOAD_SECONDS, _MAXIMUM_SECONDS, _WARM_UP_SECONDS = 15.0, 5.0, 5.0
_OVERLOAD = 4
_MAX_RUNNING, _MAX_WAITING = 16, 32
_MAX_TOKENS = 32
_OPTIONS = (
    f"--max-running={_MAX_RUNNING}", f"--max-waiting={_MAX_WAITING}", "--max-step-tokens=64", "--num-pages=512",
    "--max-context=512",
)  # fmt: skip


@dataclass
class Phase:
    """What the callers of one part of a run saw."""

    seconds: float = 0.0
    num_completed: int = 0
    num_tokens: int = 0
    refusal_seconds: list[float] = field(default_factory=list)
    retry_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@pytest.fixture
def overloaded(tmp_path: Path, num_requests: int) -> Iterator[Served]:
    """A server on one core, with this process on another."""
    if num_requests < 10_000:
        pytest.skip("compares times; see make fuzz")
    allowed = os.sched_getaffinity(0)
    with serving(tmp_path, *_OPTIONS, num_layers=6) as served:
        if len(cores := sorted(allowed)) > 1:
            for thread in Path(f"/proc/{served.process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores[:1])
            os.sched_setaffinity(0, cores[1:2])
        try:
            yield served
        finally:
            os.sched_setaffinity(0, allowed)


def test_goodput_and_refusals_at_four_times_the_load(overloaded: Served):
    """Only runs by `make fuzz`, on a machine that has nothing else to do."""
    closed, during, memory = asyncio.run(_rounds(overloaded))
    goodputs = [
        2 * phase.tokens_per_second / (before.tokens_per_second + after.tokens_per_second)
        for before, phase, after in zip(closed, during, closed[1:], strict=False)
    ]
    refusals = sorted(seconds for phase in during for seconds in phase.refusal_seconds)
    num_completed = sum(phase.num_completed for phase in during)
    p99 = refusals[len(refusals) * 99 // 100]
    print(
        f"{_OVERLOAD} times the load: goodput {statistics.median(goodputs):.3f} of the maximum "
        f"({', '.join(f'{goodput:.3f}' for goodput in goodputs)}); {num_completed} served, {len(refusals)} refused, "
        f"in {1e3 * statistics.median(refusals):.1f} ms, P99 {1e3 * p99:.1f}; told to retry in up to "
        f"{max(seconds for phase in during for seconds in phase.retry_seconds):.2f} s; memory "
        f"{', '.join(f'{num_bytes / 2**20:.0f}' for num_bytes in memory)} MiB"
    )
    assert not [error for phase in (*closed, *during) for error in phase.errors]
    assert all(len(phase.retry_seconds) == len(phase.refusal_seconds) for phase in during), "refused without a hint"
    assert len(refusals) > num_completed, "the load was not above the maximum"
    assert statistics.median(goodputs) >= MIN_GOODPUT
    assert p99 <= MAX_REFUSAL_SECONDS
    assert memory[-1] <= memory[0] * (1 + MAX_MEMORY_GROWTH)
    overloaded.check_clean()


async def _rounds(served: Served) -> tuple[list[Phase], list[Phase], list[int]]:
    """Returns the closed loops, the overloads between them, and the server's memory after each overload."""
    draw = random.Random(0)
    async with AsyncClient(served.target, token="crowd") as client:
        await _closed_loop(client, draw, _WARM_UP_SECONDS)
        closed, during, memory = [await _closed_loop(client, draw, _MAXIMUM_SECONDS)], [], []
        for _ in range(_NUM_ROUNDS):
            rate = _OVERLOAD * closed[-1].num_completed / closed[-1].seconds
            during.append(await _open_loop(client, draw, rate, _OVERLOAD_SECONDS))
            closed.append(await _closed_loop(client, draw, _MAXIMUM_SECONDS))
            memory.append(served.main.memory_bytes()[0])
    return closed, during, memory


async def _closed_loop(client: AsyncClient, draw: random.Random, seconds: float) -> Phase:
    """Runs callers that each send a new request after an answer; 1.5 callers per slot keep all slots busy."""
    phase = Phase(seconds=seconds)
    end = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end:
            await _call(client, draw, phase, end)

    await asyncio.gather(*(caller() for _ in range(_MAX_RUNNING + _MAX_RUNNING // 2)))
    return phase


async def _open_loop(client: AsyncClient, draw: random.Random, rate: float, seconds: float) -> Phase:
    """Runs callers that arrive at random, `rate` per second, whether or not earlier ones have been served."""
    phase = Phase(seconds=seconds)
    next_arrival = time.monotonic()
    end = next_arrival + seconds
    calls: set[asyncio.Task[None]] = set()
    while (next_arrival := next_arrival + draw.expovariate(rate)) < end:
        await asyncio.sleep(max(next_arrival - time.monotonic(), 0.0))
        call = asyncio.create_task(_call(client, draw, phase, end))
        calls.add(call)
        call.add_done_callback(calls.discard)
    await asyncio.gather(*calls)
    return phase


async def _call(client: AsyncClient, draw: random.Random, phase: Phase, end: float) -> None:
    """Sends one request and adds its result to the phase; tokens after the end of the phase do not count."""
    prompt = [draw.randrange(300, 2000) for _ in range(draw.randint(16, 48))]
    started, num_tokens, has_ended = time.monotonic(), 0, False
    try:
        async for chunk in client.generate(prompt, max_tokens=_MAX_TOKENS, temperature=0.8, ignore_eos=True):
            if time.monotonic() < end:
                num_tokens += len(chunk.token_ids)
                has_ended = chunk.finish is not None
    except CallError as error:
        if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            phase.errors.append(str(error))
            return
        phase.refusal_seconds.append(time.monotonic() - started)
        if error.retry_seconds is not None:
            phase.retry_seconds.append(error.retry_seconds)
        return
    phase.num_completed += has_ended
    phase.num_tokens += num_tokens
