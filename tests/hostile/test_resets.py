"""Calls that are reset as fast as connections carry them (HTTP/2 rapid reset) hold up no neighbour.

`connections.CONNECTIONS` has a few of them, which are not read. Here the callers read, and connect again when the
server closes their connection.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from meshserve.runtime.client.client import CallError, Client
from tests.hostile.connections import resets
from tests.hostile.neighbour import STREAMS
from tests.hostile.served import Served, percentile
from tests.waiting import WAIT_SECONDS

MAX_GROWTH_MS = 100.0  # of the longest gap between a neighbour's tokens
MAX_MEMORY_GROWTH = 0.1
_MEMORY_SECONDS = 60.0  # until then
_NUM_STREAMS = 60  # of the neighbour, one after the other, whose gaps are compared
_NUM_CONNECTIONS = 4
_NUM_OTHER_STREAMS = 5  # beside the neighbour's
_PIECE_BYTES = 1 << 16
_CONNECT_SECONDS = 1.0  # the server may not let it connect


def send_resets(target: str, number: int) -> None:
    """Sends calls that are each reset over one connection until it is closed, from an address of their own."""
    host, port = target.split(":")
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), _CONNECT_SECONDS, source_address=("127.0.0.2", 0)) as connection,
    ):
        connection.settimeout(WAIT_SECONDS)
        reader = threading.Thread(target=_read, args=(connection,))
        reader.start()
        try:
            connection.sendall(resets(number))
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            reader.join()


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(_PIECE_BYTES):
            pass


@contextlib.contextmanager
def resetting(target: str, number: int, *, again: bool) -> Iterator[None]:
    """Sends this many calls that are reset over four connections, which are opened `again` when they are closed."""
    is_over = threading.Event()

    def send() -> None:
        while True:
            send_resets(target, number // _NUM_CONNECTIONS)
            if is_over.is_set() or not again:
                return

    threads = [threading.Thread(target=send) for _ in range(_NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def other_streams(served: Served) -> Iterator[None]:
    """Has further callers stream without a pause, none of whose calls may fail."""
    is_over, failures = threading.Event(), []

    def stream() -> None:
        with Client(served.target, token="crowd") as client:
            while not is_over.is_set():
                try:
                    list(client.generate([300], max_tokens=100, ignore_eos=True, timeout_seconds=WAIT_SECONDS))
                except CallError as error:
                    failures.append(f"{error.code}: {error}")

    threads = [threading.Thread(target=stream) for _ in range(_NUM_OTHER_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[:3]


@pytest.mark.parametrize("again", [False, True], ids=["connected once", "connected again"])
def test_resets_harm_nobody(served: Served, again: bool, num_requests: int, num_streams: int):
    """With `make fuzz` a million resets, and bounds of time and memory."""
    is_long = num_requests >= 10_000
    number = 1_000_000 if is_long else 20_000
    how = "connections are opened again" if again else "connections are opened once"
    alone, beside = f"six streams, {how} later", f"resets beside six streams, {how}"
    if is_long:
        with served.under_attack(alone, _NUM_STREAMS), other_streams(served):
            served.neighbour.wait_for_streams(_NUM_STREAMS)
    memory = served.main.memory_bytes()[0]
    with served.under_attack(beside, num_streams), other_streams(served), resetting(served.target, number, again=again):
        served.neighbour.wait_for_streams(_NUM_STREAMS if is_long else num_streams)
    if not is_long:
        return
    growth_ms = {}
    for kind in STREAMS:
        longest, first = (
            [percentile(times[name, kind], 1.0) for name in (alone, beside)] for times in (served.gaps, served.first)
        )
        growth_ms[kind] = longest[1] - longest[0]
        print(
            f"{kind} streams, alone and beside: longest gap {longest[0]:.1f} and {longest[1]:.1f} ms, longest time "
            f"to a first message {first[0]:.1f} and {first[1]:.1f} ms"
        )
    end, most = time.monotonic() + _MEMORY_SECONDS, memory * (1 + MAX_MEMORY_GROWTH)
    while (now := served.main.memory_bytes()[0]) > most and time.monotonic() < end:
        time.sleep(1)
    print(f"memory: {memory >> 20} MiB before, {now >> 20} after")
    assert now <= most
    assert max(growth_ms.values()) <= MAX_GROWTH_MS, growth_ms
