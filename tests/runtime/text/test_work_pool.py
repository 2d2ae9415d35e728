"""Turns, bounds and callers that leave."""

import asyncio
import threading

import pytest

from meshserve.runtime.api.errors import QueueFullError, QuotaExceededError
from meshserve.runtime.text.work_pool import Paced, WorkPool
from tests.waiting import WAIT_SECONDS


def pool_of(**changes: int) -> WorkPool:
    return WorkPool("test", **({"num_threads": 1, "max_calls": 100, "max_size": 1000} | changes))


class Gate:
    """Work that waits for `open`, so that everything behind it stays where it is."""

    def __init__(self) -> None:
        self.opened, self.started = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.opened.wait(WAIT_SECONDS)
        return "through"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tenants_take_turns():
    async def main() -> None:
        pool, gate, order = pool_of(), Gate(), []
        calls = [asyncio.create_task(pool.run("flood", 1, gate))]
        await settle()
        for tenant, number in [*(("flood", i) for i in range(5)), ("b", 0), ("b", 1), ("c", 0)]:
            calls.append(asyncio.create_task(pool.run(tenant, 1, order.append, (tenant, number))))
            await settle()
        gate.opened.set()
        await asyncio.gather(*calls)
        assert order == [
            ("flood", 0), ("b", 0), ("c", 0), ("flood", 1), ("b", 1), ("flood", 2), ("flood", 3), ("flood", 4),
        ]  # fmt: skip
        assert pool.num_calls == 0 and not pool._loads and not pool._turns

    asyncio.run(main())


@pytest.mark.parametrize("bound", [{"max_calls": 4}, {"max_size": 40}])
def test_a_tenant_may_have_half_and_the_refused_learn_when_to_retry(bound):
    async def main() -> None:
        pool, gate = pool_of(**bound), Gate()
        calls = [asyncio.create_task(pool.run(tenant, 10, gate)) for tenant in "aabb"]
        await settle()
        with pytest.raises(QuotaExceededError, match="2 calls of 20 characters, bytes or tokens are in pro") as caught:
            await pool.run("a", 10, str)
        assert (caught.value.subject, caught.value.retry_seconds) == ("tenant:a", 1.0)
        with pytest.raises(QueueFullError, match="4 calls are in progress") as full:
            await pool.run("c", 10, str)
        assert full.value.retry_seconds == 1.0
        gate.opened.set()
        assert await asyncio.gather(*calls) == ["through"] * 4
        assert await pool.run("a", 10, str) == ""

    asyncio.run(main())


def test_a_caller_who_leaves_gives_its_place_back_at_once_and_its_thread_in_the_end():
    async def main() -> None:
        pool, gate = pool_of(), Gate()
        running = asyncio.create_task(pool.run("a", 1, gate))
        waiting = [asyncio.create_task(pool.run("a", 1, str)) for _ in range(3)]
        await settle()
        assert gate.started.wait(WAIT_SECONDS)
        for call in (running, *waiting):
            call.cancel()
        await asyncio.gather(running, *waiting, return_exceptions=True)
        assert pool.num_calls == 0 and pool._num_idle == 0
        last = asyncio.create_task(pool.run("a", 1, str))
        await settle()
        assert not last.done(), "the thread still works for the caller who left"
        gate.opened.set()
        assert await last == ""

    asyncio.run(main())


def test_a_caller_who_leaves_when_its_turn_comes_loses_no_thread():
    async def main() -> None:
        pool, gate = pool_of(), Gate()
        first = asyncio.create_task(pool.run("a", 1, gate))
        second = asyncio.create_task(pool.run("a", 1, str))
        await settle()
        release = pool._release

        def release_and_cancel() -> None:
            release()
            second.cancel()

        pool._release = release_and_cancel  # type: ignore[method-assign]
        gate.opened.set()
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
        pool._release = release  # type: ignore[method-assign]
        assert await pool.run("a", 1, str) == "" and pool._num_idle == 1

    asyncio.run(main())


def test_errors_reach_the_caller():
    async def main() -> None:
        pool = pool_of()
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await pool.run("a", 1, divmod, 1, 0)

    asyncio.run(main())


def test_paced_work_takes_a_share_of_the_time():
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    def work(seconds: float) -> float:
        nonlocal now
        now += seconds
        return seconds

    paced = Paced(0.1, lambda: now, sleep)
    for seconds in (0.5, 0.1, 0.0, 0.2):
        assert paced(work, seconds) == seconds
    now += 1.0  # idle for longer than the rest of 1.8 s leaves
    with pytest.raises(ZeroDivisionError):
        paced(lambda: 1 / 0)
    assert slept == pytest.approx([0.0, 4.5, 0.9, 0.0, 0.8])
