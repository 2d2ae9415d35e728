"""Valid streams beside callers who cancel, expire, send nonsense, connect again and again, and scrapes of the metrics.

None of the streams may be wrong, and the server's memory, threads and descriptors must stay as they are.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from tests.hostile.connections import CONNECTIONS
from tests.hostile.floods import FLOODS, flooding, generate
from tests.hostile.neighbour import STREAMS
from tests.hostile.served import Served, bearer
from tests.hostile.test_requests import mutated
from tests.waiting import WAIT_SECONDS

MAX_GROWTH = {"memory": 0.05, "threads": 0.1, "descriptors": 0.1}  # from the first third of the rounds to the last
NUM_VALID, SECONDS = 2_000, 240.0  # at least, with `make fuzz`
_ROUND_SECONDS = 20.0
_NUM_WARM_UPS = 3  # rounds that fill pools and caches
_NUM_CALLERS = 6  # with valid streams
_STREAMS_PER_CONNECTION = 5
_SCRAPE_SECONDS = 0.2
_PROMPTS = ([300], [301, 302, 303], list(range(300, 340)))
_VALID = [
    generate(token_ids=token_ids, max_tokens=16, ignore_eos=True, **fields)
    for token_ids in _PROMPTS
    for fields in STREAMS.values()
]
_Answer = tuple[list[int], str, int]


async def answer(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> _Answer:
    """Returns the tokens, the text and the reason with which a stream ends."""
    token_ids: list[int] = []
    text, reason = "", 0
    generate = pb_grpc.InferenceServiceStub(channel).Generate
    async for message in generate(request, timeout=WAIT_SECONDS, metadata=bearer("crowd")):
        token_ids += message.token_ids
        text += message.text
        reason = message.finish.reason or reason
    return token_ids, text, reason


def connected(served: Served) -> grpc.aio.Channel:
    """Returns a connection of its own."""
    return grpc.aio.insecure_channel(served.target, options=[("grpc.use_local_subchannel_pool", 1)])


@dataclasses.dataclass
class Mix:
    """The callers of a round, each of which goes on until `is_over`.

    Attributes:
      alone: What each valid request gets when there is no other.
      wrong: What others got, or how their streams failed.
    """

    served: Served
    alone: list[_Answer]
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    num_valid: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    is_over: bool = False

    async def stream(self) -> None:
        """Has valid streams, and a new connection after some of them."""
        while not self.is_over:
            async with connected(self.served) as channel:
                for number in itertools.islice(self.numbers, _STREAMS_PER_CONNECTION):
                    right = self.alone[number % len(_VALID)]
                    try:
                        got = await answer(channel, _VALID[number % len(_VALID)])
                    except grpc.aio.AioRpcError as error:
                        self.wrong.append(f"{error.code()}: {error.details()}")
                    else:
                        self.num_valid += 1
                        if got != right:
                            self.wrong.append(f"{got} instead of {right}")
            self.ends["connections of valid streams"] += 1

    async def flood(self, name: str) -> None:
        async with flooding(self.served, dataclasses.replace(FLOODS[name], num_callers=2)) as ends:
            while not self.is_over:
                await asyncio.sleep(0.05)
        self.ends[name] += ends.total()

    async def send_nonsense(self) -> None:
        while not self.is_over:
            impatient, patient = await mutated(self.served.target, 50)
            self.ends["malformed requests"] += impatient.total() + patient.total()

    async def leave(self) -> None:
        """Closes connections in the middle of a stream."""
        request = generate(max_tokens=200, ignore_eos=True)
        while not self.is_over:
            async with connected(self.served) as channel:
                call = pb_grpc.InferenceServiceStub(channel).Generate(request, metadata=bearer("attacker"))
                with contextlib.suppress(grpc.aio.AioRpcError):  # the quota may be taken
                    await call.read()
            self.ends["connections left"] += 1

    async def reset(self) -> None:
        """Resets connections with calls that have just begun."""
        connections = CONNECTIONS["calls that are reset with the connection"]

        def attack() -> None:
            with connections.open(self.served.target):
                pass

        while not self.is_over:
            await asyncio.to_thread(attack)
            self.ends["connections reset"] += connections.number
            await asyncio.sleep(0.5)

    async def scrape(self) -> None:
        def read() -> None:
            with urllib.request.urlopen(f"http://{self.served.probes}/metrics", timeout=WAIT_SECONDS) as page:
                assert b"meshserve_requests_total" in page.read()

        while not self.is_over:
            await asyncio.to_thread(read)
            self.ends["scrapes"] += 1
            await asyncio.sleep(_SCRAPE_SECONDS)

    async def run(self, seconds: float, num_valid: int) -> None:
        """Has all callers call for a while, and until this many valid streams have ended."""

        async def watch() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end or self.num_valid < num_valid:
                await asyncio.sleep(0.05)
            self.is_over = True

        self.is_over, self.num_valid = False, 0
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_CALLERS):
                tasks.create_task(self.stream())
            for name in ("calls that are cancelled", "deadlines of 5 ms"):
                tasks.create_task(self.flood(name))
            for caller in (self.send_nonsense, self.leave, self.reset, self.scrape, watch):
                tasks.create_task(caller())


async def answers_alone(served: Served) -> list[_Answer]:
    async with connected(served) as channel:
        return [await answer(channel, request) for request in _VALID]


def quantities(served: Served) -> dict[str, int]:
    """Returns what must stay flat, without what workers of constraints take, whose number has bounds of its own."""
    counts = served.main.counts()
    return {
        "memory": served.main.memory_bytes()[0],
        "threads": counts["threads"],
        "descriptors": counts["descriptors"] - 2 * counts["workers"],
    }


def test_valid_streams_beside_everything_else(served: Served, num_requests: int):
    """With `make fuzz` for four minutes and at least 2,000 valid streams; otherwise as long as some streams take."""
    is_long = num_requests >= 10_000
    mix = Mix(served, asyncio.run(answers_alone(served)))
    if not is_long:
        with served.under_attack("mixed load"):
            asyncio.run(mix.run(0.0, 2 * len(_VALID)))
        assert not mix.wrong, mix.wrong[:3]
        return
    samples: list[dict[str, int]] = []
    num_valid, seconds = 0, 0.0
    for number in itertools.count(-_NUM_WARM_UPS):
        if seconds >= SECONDS and num_valid >= NUM_VALID:
            break
        with served.under_attack("mixed load"):
            began = time.monotonic()
            asyncio.run(mix.run(_ROUND_SECONDS, 0))
        if number >= 0:
            num_valid, seconds = num_valid + mix.num_valid, seconds + time.monotonic() - began
            samples.append(quantities(served))
            print(f"{seconds:4.0f} s: {num_valid} valid streams, {len(mix.wrong)} wrong; {samples[-1]}", flush=True)
        assert not mix.wrong, mix.wrong[:3]
    print(f"{dict(mix.ends)}")
    part = len(samples) // 3
    for name, most in MAX_GROWTH.items():
        before, after = (statistics.median(each[name] for each in side) for side in (samples[:part], samples[-part:]))
        print(f"{name}: {before} in the first third, {after} in the last")
        assert after <= before * (1 + most)
