"""One tenant against the others, by requests that it repeats. See `floods.FLOODS`."""

import asyncio

import pytest

from tests.hostile.floods import FLOODS, flooding
from tests.hostile.served import Served


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_harms_nobody(served: Served, name: str, num_streams: int):
    flood = FLOODS[name]

    async def attack() -> None:
        async with flooding(served, flood) as ends:
            await asyncio.to_thread(served.neighbour.wait_for_streams, num_streams)
        print(f"{name}: {dict(ends)}")
        assert ends.total() >= flood.num_callers

    with served.under_attack(name, num_streams):
        asyncio.run(attack())
