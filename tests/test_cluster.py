"""Several real processes on virtual CPU devices, spoken to through gRPC: lockstep, and how it ends."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.runtime.client import CallError, Client
from meshserve.runtime.local_cluster import LocalCluster, local_cluster

FAIL_SECONDS = 20.0  # half of it without a sign of life is a failure, also on a busy machine
FLAGS = [
    "--model=demo", "--tp=4", "--dtype=float32", "--page-size=16", "--max-running=2", "--max-step-tokens=2",
    "--num-pages=128", "--no-controls", f"--fail-seconds={FAIL_SECONDS:g}", "--drain-seconds=60",
]  # fmt: skip
NUM_STREAMS = 12


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first cluster compiles, the others find its programs."""
    return f"--cache-dir={tmp_path_factory.mktemp('programs')}"


@contextlib.contextmanager
def ready(num_processes: int, cache: str, folder: Path, *flags: str) -> Iterator[LocalCluster]:
    flags = (*FLAGS, cache, f"--cpu-devices={4 // num_processes}", *flags)
    with local_cluster(num_processes, flags, folder) as cluster, Client(cluster.target) as client:
        cluster.wait_until_ready(client, 240)
        yield cluster


class Stream(threading.Thread):
    """One request, some of them cancelled on the way. `ended` is when it was over, on the clock of `time.monotonic`."""

    def __init__(self, target: str, index: int, max_tokens: int = 40):
        super().__init__(daemon=True)
        self.token_ids: tuple[int, ...] = ()
        self.error: CallError | None = None
        self.ended = 0.0
        self.is_cancelled = index % 4 == 3
        self._target, self._index, self._max_tokens = target, index, max_tokens
        self.start()

    def run(self) -> None:
        prompt = [300 + (7 * self._index + position) % 500 for position in range(1 + 4 * self._index)]
        sampling = {"temperature": 0.9 * (self._index % 2), "seed": self._index, "ignore_eos": True}
        try:
            with Client(self._target) as client:
                for chunk in client.generate(prompt, max_tokens=self._max_tokens, **sampling):
                    self.token_ids += chunk.token_ids
                    if self.is_cancelled and len(self.token_ids) > 5:
                        break
        except CallError as error:
            self.error = error
        self.ended = time.monotonic()


def mixed_load(target: str) -> list[tuple[int, ...]]:
    streams = [Stream(target, index) for index in range(NUM_STREAMS)]
    for stream in streams:
        stream.join(120)
        assert stream.error is None and stream.ended
    return [stream.token_ids[: 5 if stream.is_cancelled else None] for stream in streams]


def health(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


def test_the_same_tokens_as_one_process_and_an_end_in_order(cache, tmp_path, every_case):
    tokens = {}
    for num_processes in (1, 2, 4) if every_case else (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        with ready(num_processes, cache, folder) as cluster:
            tokens[num_processes] = mixed_load(cluster.target)
            for target in cluster.targets:
                assert health(target) == health_pb2.HealthCheckResponse.SERVING
            if num_processes == 2:  # a follower that is told to stop drains everybody: the open stream ends well
                stream = Stream(cluster.target, 1)
                time.sleep(0.1)
                cluster.processes[1].send_signal(signal.SIGTERM)
                stream.join(60)
                assert stream.error is None and len(stream.token_ids) == 40
                assert cluster.wait(30) == [0, 0]
            else:
                assert cluster.stop() == [0] * num_processes, cluster.log(0).read_text()
    assert all(made == tokens[1] for made in tokens.values())
    assert len(tokens[1][0]) == 40


@pytest.mark.parametrize(
    ("victim", "number", "statuses", "is_always"),
    [
        (1, signal.SIGKILL, {0: 1}, True),
        (0, signal.SIGKILL, {}, False),  # jax may abort the follower before we end it: any status but 0
        (1, signal.SIGSTOP, {0: 1, 1: -signal.SIGKILL}, False),  # the guard kills what is stopped
        (0, signal.SIGSTOP, {0: -signal.SIGKILL}, True),
    ],
)
def test_a_lost_process_ends_everybody_within_the_limit(
    cache, tmp_path, every_case, victim, number, statuses, is_always
):
    if not (is_always or every_case):
        pytest.skip("one of the cases that --every-case adds")
    with ready(2, cache, tmp_path) as cluster:
        streams = [Stream(cluster.target, 4 * index, max_tokens=900) for index in range(2)]
        while not all(stream.token_ids for stream in streams):
            time.sleep(0.01)
        began = time.monotonic()
        cluster.processes[victim].send_signal(number)
        for stream in streams:
            stream.join(FAIL_SECONDS)
            assert stream.error is not None and stream.error.code is grpc.StatusCode.UNAVAILABLE
            assert stream.ended - began < FAIL_SECONDS
        if victim == 1:
            assert "the engine failed: " in str(streams[0].error)
        ended = cluster.wait(FAIL_SECONDS - (time.monotonic() - began))
        assert 0 not in ended and ended == [statuses.get(index, status) for index, status in enumerate(ended)]
