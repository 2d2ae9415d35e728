"""Signals to a busy server. What is open ends as promised, nothing is compiled any more, and no process stays."""

import contextlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from tests.hostile.connections import UNREAD_HEALTH, Connections
from tests.hostile.floods import generate
from tests.hostile.processes import is_busy, worker_processes
from tests.hostile.served import Served, bearer, serving
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode


def test_reloads_harm_nobody(served: Served):
    """Nothing in the configuration has changed."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(0.01):
            served.process.send_signal(signal.SIGHUP)

    with served.under_attack("SIGHUP every 10 ms"):
        thread = threading.Thread(target=send)
        thread.start()
        try:
            served.neighbour.wait_for_streams(2)
        finally:
            is_over.set()
            thread.join()


@dataclass(frozen=True)
class Ending:
    """Signals that end a busy server.

    Attributes:
      requests: What is sent before, all at the same time.
      is_under_way: Whether the server is busy with it; takes the server, and the number of calls that have ended.
      codes: How these calls may end.
      options: The server's options.
      connections: Those that are open meanwhile.
    """

    requests: Sequence[pb.GenerateRequest]
    is_under_way: Callable[[Served, int], bool]
    codes: frozenset[Code]
    signals: Sequence[signal.Signals]
    options: tuple[str, ...] = ()
    connections: Connections = field(default_factory=lambda: Connections(b"", 0))


def _are_open(served: Served, num_ended: int) -> bool:
    return served.operator.server_info().num_open_requests + num_ended >= 100


def _is_compiling(served: Served, num_ended: int) -> bool:
    return num_ended == 0 and sum(map(is_busy, served.workers())) >= 2


ENDINGS: Mapping[str, Ending] = {
    "SIGTERM under load, and SIGHUPs": Ending(
        [generate(max_tokens=60, ignore_eos=True)] * 100,
        _are_open,
        frozenset({Code.OK}),
        (signal.SIGTERM, *(signal.SIGHUP,) * 20),
        (f"--drain-seconds={WAIT_SECONDS:g}",),
        UNREAD_HEALTH,
    ),
    "SIGTERM while constraints are compiled": Ending(
        [generate(max_tokens=1, constraint={"regex": ".*" * number}) for number in (30_000, 29_999)],
        _is_compiling,
        frozenset({Code.UNAVAILABLE, Code.CANCELLED}),
        (signal.SIGTERM,),
        ("--drain-seconds=0", "--constraint-memory-mib=4096", f"--constraint-seconds={WAIT_SECONDS:g}"),
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_busy_server_ends(name: str, tmp_path: Path):
    ending = ENDINGS[name]
    with (
        serving(tmp_path, *ending.options) as served,
        ending.connections.open(served.target),
    ):
        options = [("grpc.use_local_subchannel_pool", 1)]
        with ThreadPoolExecutor(len(ending.requests)) as pool, grpc.insecure_channel(served.target, options) as channel:
            generate_call = pb_grpc.InferenceServiceStub(channel).Generate
            calls = [
                generate_call(request, metadata=bearer("crowd"), timeout=WAIT_SECONDS) for request in ending.requests
            ]
            ends = [pool.submit(_end_of, call) for call in calls]
            wait_for(lambda: ending.is_under_way(served, sum(end.done() for end in ends)))
            templates, workers = worker_processes(served.process.pid)
            for number in ending.signals:
                served.process.send_signal(number)
            assert {end.result(WAIT_SECONDS) for end in ends} <= ending.codes
        assert served.process.wait(WAIT_SECONDS) == 0
        wait_for(lambda: not any(Path(f"/proc/{each}").exists() for each in (*templates, *workers)))
        assert "Traceback" not in (log := served.log.read_text()), log


def _end_of(call: grpc.Call) -> Code:
    """Reads a stream to its end. Returns its status; OK only if its last message says how it ended."""
    messages = []
    with contextlib.suppress(grpc.RpcError):
        messages += call
    assert call.code() is not Code.OK or messages[-1].HasField("finish")
    return call.code()
