"""What only a long run can show: the gaps beside floods, and memory over ten minutes of all attacks."""

import asyncio
import itertools
import random
import statistics
import time

import pytest

from tests.hostile.connections import CONNECTIONS
from tests.hostile.corpus import CORPUS
from tests.hostile.floods import FLOODS, Flood, flooding, generate
from tests.hostile.neighbour import STREAMS
from tests.hostile.served import MAX_WORKER_BYTES, Served, percentile
from tests.hostile.test_constraints import compile_all
from tests.hostile.test_requests import ask_everything, mutated

# By how much the gaps between a neighbour's tokens may grow beside a flood, in milliseconds: at the median and at P99.
MAX_GROWTH = {0.5: 20.0, 0.99: 100.0}
MAX_FIRST_GROWTH = 100.0  # likewise, for the median time to a first message
MAX_MEMORY_GROWTH = 0.05  # the server's growth over the minutes
_ROUND_SECONDS = 5.0
_WARM_UP_MINUTES = 2.0  # that fill pools and caches
_NUM_STREAMS = 60  # whose gaps are compared
_NUM_FLOODS = 3  # at the same time
# Floods whose effect on a neighbour's times is bounded; they take the workers, the slots and the lock that it needs.
_DELAYING = (
    "masks of an ambiguous grammar",
    "masks of a very ambiguous grammar",
    "the largest priority",
    "Tokenize of 150 kB",
)


def flood_beside(served: Served, name: str, num_streams: int) -> None:
    """Runs streams of the neighbour beside a flood, "" for none."""

    async def attack() -> None:
        async with flooding(served, FLOODS[name]):
            await asyncio.to_thread(served.neighbour.wait_for_streams, num_streams)

    with served.under_attack(name or "alone", num_streams):
        if name:
            asyncio.run(attack())
        else:
            served.neighbour.wait_for_streams(num_streams)


@pytest.mark.parametrize("name", _DELAYING)
def test_a_flood_hardly_delays_a_neighbour(served: Served, name: str, num_requests: int):
    """Compares times, so it only runs by `make fuzz`, on a machine that has nothing else to do."""
    if num_requests < 10_000:
        pytest.skip("compares times; see make fuzz")
    for each in ("", name):
        flood_beside(served, each, _NUM_STREAMS)
    for kind in STREAMS:
        for share, most in MAX_GROWTH.items():
            alone, beside = (percentile(served.gaps[each, kind], share) for each in ("alone", name))
            print(f"{kind} streams, {share:.0%} of the gaps: {alone:.1f} ms alone, {beside:.1f} beside {name}")
            assert beside - alone <= most
        alone, beside = (percentile(served.first[each, kind], 0.5) for each in ("alone", name))
        print(f"{kind} streams, first messages: {alone:.1f} ms alone, {beside:.1f} beside {name}")
        assert beside - alone <= MAX_FIRST_GROWTH


def _attack(served: Served, draw: random.Random, seeds: itertools.count) -> None:
    """Attacks in several ways at the same time for some seconds."""
    names = draw.sample([*FLOODS], _NUM_FLOODS)
    corpus = Flood("Generate", lambda number: generate(max_tokens=40, constraint=draw.choice([*CORPUS.values()])[0]))

    async def flood(each: Flood) -> None:
        async with flooding(served, each):
            await asyncio.sleep(_ROUND_SECONDS)

    async def attack() -> None:
        first = next(seeds) * 1_000
        await asyncio.gather(
            *(flood(FLOODS[name]) for name in names),
            flood(corpus),
            mutated(served.target, 200),
            ask_everything(served.target, 20),
            compile_all(served.target, iter(range(first, first + 20))),
        )

    with served.under_attack(" + ".join(names)), CONNECTIONS[draw.choice([*CONNECTIONS])].open(served.target):
        asyncio.run(attack())


def test_memory_stays_flat(served: Served, pytestconfig: pytest.Config):
    """Compares the server's memory after each round, when nothing is open: medians of the first and of the last third.

    The workers of constraints are as many as the last constraints needed, so their memory goes up and down with their
    number. That number is bounded, and each of them may hold its limit at most.
    """
    minutes = pytestconfig.getoption("--minutes")
    if not minutes:
        pytest.skip("needs --minutes; see make fuzz")
    draw, seeds = random.Random(0), itertools.count()
    for name in FLOODS:
        flood_beside(served, name, 1)
    started, samples = time.monotonic() + 60 * _WARM_UP_MINUTES, []
    while (elapsed := time.monotonic() - started) < 60 * minutes:
        _attack(served, draw, seeds)
        server, workers = served.main.memory_bytes()
        counts = served.main.counts()
        print(f"{elapsed:4.0f} s: {server / 2**20:.1f} + {workers / 2**20:.1f} MiB, {counts}", flush=True)
        assert workers <= (counts["templates"] + counts["workers"]) * MAX_WORKER_BYTES
        if elapsed > 0:
            samples.append(server)
    part = max(1, len(samples) // 3)
    before, after = (statistics.median(each) for each in (samples[:part], samples[-part:]))
    print(f"server: {before / 2**20:.1f} MiB at first, {after / 2**20:.1f} MiB in the end, {len(samples)} rounds")
    assert after <= before * (1 + MAX_MEMORY_GROWTH)
