"""Tests of `benchmarks.baselines.streams`: a batch's calls are sent before all of them are made."""

import asyncio
from collections.abc import AsyncIterator

from meshserve.benchmarks.baselines.job import Batch
from meshserve.benchmarks.baselines.streams import streaming
from meshserve.benchmarks.lib.workloads import Work


def test_first_calls_are_sent_before_the_last_are_made() -> None:
    events: list[tuple[str, int]] = []

    async def stream(work: Work, temperature: float) -> AsyncIterator[int]:
        number = work.prompt_token_ids[0]
        events.append(("made", number))
        await asyncio.sleep(0)  # a call is sent by the event loop, behind all that is already due
        events.append(("sent", number))
        for _ in range(work.max_tokens):
            yield 1

    loop = asyncio.new_event_loop()
    batch = Batch([Work([number], 3) for number in range(256)], 0.0)
    times = streaming("fake", loop, stream, 0).run(batch)
    loop.close()
    assert times.num_tokens == 3 * 256 and len(times.first_seconds) == 256
    assert events.index(("sent", 0)) < events.index(("made", 16))
    assert [number for event, number in events if event == "made"] == list(range(256))
