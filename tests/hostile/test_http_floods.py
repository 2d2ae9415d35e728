"""Attacks on the ports that speak HTTP, beside neighbours who stream over gRPC and over HTTP.

See `http_floods.HTTP_FLOODS` and `connections.HTTP_CONNECTIONS`. `make test` has the attacks of a kind come together
and be short, `make fuzz` one after the other. It also bounds times and memory.
"""

import asyncio
import dataclasses
import http.client
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack

import pytest

from tests.hostile import json_mutations
from tests.hostile.connections import AMBIGUOUS, HTTP_CONNECTIONS
from tests.hostile.http_callers import http_flooding
from tests.hostile.http_floods import HTTP_FLOODS, LONG, SHORT, HttpFlood, Sizes
from tests.hostile.neighbour import HTTP_STREAMS, STREAMS
from tests.hostile.served import Served, percentile
from tests.waiting import WAIT_SECONDS

KINDS = (*HTTP_STREAMS, *STREAMS)
MAX_GROWTH_MS = 100.0  # of 99 of 100 gaps between a neighbour's tokens
MAX_MEMORY_GROWTH = 0.1
_MEMORY_SECONDS = 60.0  # until then
_FEW_BYTES = 1_000
_NUM_STREAMS = 60  # whose gaps are those without an attack


@pytest.fixture(scope="module")
def alone(served: Served, pytestconfig: pytest.Config) -> Mapping[str, float]:
    """99 of 100 gaps of each kind of stream without an attack, in milliseconds. None in `make test`."""
    if pytestconfig.getoption("--fuzz") < 10_000:
        return {}
    with served.under_attack("nothing over HTTP", _NUM_STREAMS, KINDS):
        pass
    return {kind: percentile(served.gaps["nothing over HTTP", kind], 0.99) for kind in KINDS}


def flood(served: Served, floods: Mapping[str, HttpFlood], sizes: Sizes, num_streams: int, name: str) -> None:
    """Has floods come at the same time."""

    async def attack() -> None:
        async with AsyncExitStack() as stack:
            ends = {
                each: await stack.enter_async_context(http_flooding(served, floods[each], sizes)) for each in floods
            }
            await asyncio.to_thread(served.neighbour.wait_for_streams, num_streams)
            awaited = [ends[each] for each in floods if floods[each].num_bytes != 0]
            while not all(awaited):
                await asyncio.sleep(0.01)
        for each in floods:
            print(f"{each}: {dict(ends[each])}")

    with served.under_attack(name, num_streams, KINDS):
        asyncio.run(attack())


def beyond_limits(served: Served, name: str, alone: Mapping[str, float], memory: int) -> list[str]:
    """Returns which limits were exceeded, of those that only an idle machine can tell, in `make fuzz`."""
    found = []
    for kind, before in alone.items():
        beside = percentile(served.gaps[name, kind], 0.99)
        print(f"{name}, {kind}: 99 % of the gaps {beside:.1f} ms, {before:.1f} alone")
        if beside - before > MAX_GROWTH_MS:
            found.append(f"{name}, {kind}: gaps of {beside:.0f} ms")
    end, most = time.monotonic() + _MEMORY_SECONDS, memory * (1 + MAX_MEMORY_GROWTH)
    while (now := served.main.memory_bytes()[0]) > most and time.monotonic() < end:
        time.sleep(1)
    print(f"{name}: memory {memory >> 20} MiB before, {now >> 20} after, {served.main.peak_bytes() >> 20} at most")
    if now > most:
        found.append(f"{name}: {now >> 20} MiB")
    return found


@pytest.mark.parametrize("kind", HTTP_FLOODS)
def test_http_floods_harm_nobody(served: Served, alone: Mapping[str, float], kind: str, num_streams: int):
    floods = HTTP_FLOODS[kind]
    if not alone:
        return flood(served, floods, SHORT, num_streams, kind)
    found = []
    for name, each in floods.items():
        memory = served.main.memory_bytes()[0]
        served.main.reset_peak()
        flood(served, {name: each}, LONG, num_streams, name)
        found += beyond_limits(served, name, alone, memory)
    assert not found, found


@pytest.mark.parametrize("is_probe", [False, True], ids=["OpenAI", "probes"])
def test_http_connections_harm_nobody(served: Served, alone: Mapping[str, float], is_probe: bool, num_streams: int):
    target = served.probes if is_probe else served.openai
    names = [[*HTTP_CONNECTIONS]] if not alone else [[name] for name in HTTP_CONNECTIONS]
    found = []
    for together in names:
        name = f"{together[0]}, {'probes' if is_probe else 'OpenAI'}"
        memory = served.main.memory_bytes()[0]
        served.main.reset_peak()
        with served.under_attack(name, num_streams, KINDS), ExitStack() as stack:
            for each in together:
                connections = HTTP_CONNECTIONS[each]
                if not alone and (len(connections.data) > _FEW_BYTES or connections.piece_bytes):
                    connections = dataclasses.replace(connections, number=2)
                stack.enter_context(connections.open(target))
            served.neighbour.wait_for_streams(num_streams)
        if alone:
            found += beyond_limits(served, name, alone, memory)
    assert not found, found


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_that_has_two_meanings_has_none(served: Served, name: str):
    """It gets one answer, an error, after which the connection is closed."""
    for target in (served.openai, served.probes):
        host, port = target.split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
            connection.sendall(AMBIGUOUS[name])
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))  # noqa: B023
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer[:300]
        assert len(re.findall(rb"^HTTP/1\.[01] ", answer, re.MULTILINE)) == 1, answer


def test_random_bodies_get_the_status_they_deserve(served: Served, num_requests: int):
    """Errors of the server are 5xx; 404 is for the tasks of other models, 422 for what cannot be finished."""
    ends: Counter[int] = Counter()
    connection = http.client.HTTPConnection(served.openai, timeout=WAIT_SECONDS)
    with served.under_attack("random bodies", 1, KINDS):
        for seed in range(num_requests // 10):
            path, data = json_mutations.random_body(random.Random(seed))
            connection.request("POST", path, data, {"Authorization": "Bearer attacker"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status in (200, 400, 404, 422, 429), (seed, path, data, answer.status, text[:500])
            assert b"internal error" not in text, (seed, path, data, text)
            ends[answer.status] += 1
        connection.close()
    print(f"{ends.total()} random bodies: {dict(ends)}")
    assert ends[200] and ends[400]
