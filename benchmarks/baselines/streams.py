"""Runs batches and searches for rates on an engine that streams requests in an event loop, for baselines."""

import asyncio
import time

from meshserve.benchmarks.lib.open_loop import Stream, run_rates
from meshserve.benchmarks.lib.token_times import RunTimes, TokenClock

from .job import Batch, Started

# Calls that are made before the first of them is sent, which takes a turn of the event loop. If all of 256 were, the
# server would wait some 20 ms for the first one.
_CALLS_AT_ONCE = 8


def streaming(version: str, loop: asyncio.AbstractEventLoop, stream: Stream, kv_tokens: int) -> Started:
    """Returns an engine whose requests are streamed by `stream` in `loop`, which is not running."""

    async def send(batch: Batch, clock: TokenClock, began: float) -> None:
        async def one(index: int) -> None:
            async for num_tokens in stream(batch.works[index], batch.temperature):
                clock.add(index, began, time.perf_counter(), num_tokens)

        async with asyncio.TaskGroup() as group:
            for index in range(len(batch.works)):
                group.create_task(one(index))
                if index % _CALLS_AT_ONCE == _CALLS_AT_ONCE - 1:
                    await asyncio.sleep(0)

    def run(batch: Batch) -> RunTimes:
        clock, began = TokenClock(), time.perf_counter()
        loop.run_until_complete(send(batch, clock, began))
        times = clock.times(time.perf_counter() - began)
        expected = sum(work.max_tokens for work in batch.works)
        assert times.num_tokens == expected, f"{times.num_tokens} tokens arrived, not {expected}"
        return times

    return Started(
        version, run, kv_tokens, lambda search, show: loop.run_until_complete(run_rates(stream, search, show))
    )
