import asyncio
from collections.abc import Awaitable, Callable

import pytest

from meshserve.runtime.server import arrivals
from meshserve.runtime.server.arrivals import Arrivals


class Holds(list[bool]):
    """What an engine is told, which can be held if `is_idle`."""

    is_idle = True

    def __call__(self, is_held: bool) -> bool:
        self.append(is_held)
        return is_held and self.is_idle


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Holds:
    monkeypatch.setattr(arrivals, "_MAX_SECONDS", 1e6)  # a test that needs the limit sets it
    return Holds()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def checked() -> None:
        await main()

    asyncio.run(checked())


async def turns(num_turns: int) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


def test_the_engine_is_held_until_nothing_more_arrives(holds: Holds):
    async def main() -> None:
        arriving = Arrivals(holds)
        arriving.begin()
        await turns(50)
        assert holds == [True]
        arriving.end()
        await turns(4)  # in which gRPC brings the next call
        arriving.begin()
        await turns(50)
        arriving.begin()
        arriving.end()
        await turns(50)
        assert holds == [True]
        arriving.end()
        await turns(50)
        assert holds == [True, False]

    run(main)


def test_each_time_that_the_engine_is_idle_is_one_of_its_own(holds: Holds):
    async def main() -> None:
        arriving = Arrivals(holds)
        for _ in range(2):
            arriving.begin()
            arriving.end()
            await turns(50)
        assert holds == [True, False] * 2

    run(main)


def test_a_busy_engine_is_left_alone(holds: Holds):
    async def main() -> None:
        arriving = Arrivals(holds)
        holds.is_idle = False
        arriving.begin()
        arriving.end()
        await turns(50)
        assert holds == [True]  # asked for in vain
        holds.is_idle = True
        arriving.begin()
        await turns(50)
        arriving.end()
        await turns(50)
        assert holds == [True, True, False]

    run(main)


def test_a_request_that_is_not_submitted_holds_the_engine_for_a_limited_time(
    holds: Holds, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(arrivals, "_MAX_SECONDS", 0.001)

    async def main() -> None:
        arriving = Arrivals(holds)
        arriving.begin()
        arriving.begin()
        while holds == [True]:
            await asyncio.sleep(0.001)
        assert holds == [True, False]
        arriving.end()  # comes too late, or never
        monkeypatch.setattr(arrivals, "_MAX_SECONDS", 1e6)
        arriving.begin()
        arriving.end()
        await turns(50)
        assert holds == [True, False, True, False]

    run(main)
