"""Measures the step stream's cost on the engine's thread, and whether the device hides its delays.

    python benchmarks/engine/step_stream.py

First, without devices, sends calls of the size of real steps to 1, 3 and 7 followers that only acknowledge them, and
measures wall and CPU time of `Leader.call` on the caller's thread. Then, with two processes, measures the time between
tokens of one stream while a proxy delays every message of the step stream by some milliseconds. A delay that the device
hides has no effect.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from meshserve.benchmarks.lib.step_proxy import StepProxy
from meshserve.protos import steps_pb2 as pb
from meshserve.runtime.client.client import Client
from meshserve.runtime.cluster.replay import to_message
from meshserve.runtime.cluster.steps import Security
from meshserve.runtime.cluster.stream_client import Follower
from meshserve.runtime.cluster.stream_server import Leader
from meshserve.runtime.cluster.watchdog import Limits, Watch
from meshserve.runtime.commands.local_cluster import local_cluster, reserved_port
from meshserve.runtime.program.batch import Bucket

STEPS = {
    "decode of 64": Bucket(64, 64, 66),
    "prefill of 512": Bucket(512, 64, 80),
    "prefill of 4096": Bucket(4096, 64, 192),
}
FLAGS = (
    "--model=demo", "--tp=2", "--cpu-devices=1", "--dtype=float32", "--page-size=16", "--max-running=1",
    "--max-step-tokens=1", "--num-pages=256", "--no-logits-processors", "--fail-seconds=60",
)  # fmt: skip
READY_SECONDS = 300.0
PAUSE_SECONDS = 0.002  # between calls, similar to a device's step


def acknowledge_all(follower: Follower) -> None:
    for plan in follower.calls():
        follower.acknowledge(plan.sequence, b"")


def cost(num_followers: int, bucket: Bucket, num_calls: int) -> dict[str, float]:
    """Returns the microseconds of one call on the caller's thread, and until every follower has acknowledged it."""
    watches = [Watch(Limits(600.0)) for _ in range(num_followers + 1)]
    leader = Leader("127.0.0.1:0", num_followers + 1, watches[0], Security())
    followers = [
        Follower(f"127.0.0.1:{leader.port}", index, watches[index], Security()) for index in range(1, num_followers + 1)
    ]
    for follower in followers:
        threading.Thread(target=acknowledge_all, args=(follower,), daemon=True).start()
    leader.wait_for_followers()
    packed = np.arange(bucket.size, dtype=np.int32)
    wall, cpu = [], []
    for _ in range(num_calls):
        began, began_cpu = time.perf_counter(), time.thread_time()
        sequence = leader.call("run", [to_message(bucket), to_message(packed)])
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - began_cpu)
        leader.acknowledge(sequence, b"")
        time.sleep(PAUSE_SECONDS)
    while leader.stats.num_acknowledged < num_calls:
        time.sleep(0.01)
    lag = leader.stats.lag_seconds / num_calls
    for watch in watches:
        watch.stop()
    for follower in followers:
        follower.close()
    leader.stop()
    figures = {"wall_us": statistics.median(wall), "cpu_us": statistics.median(cpu), "acknowledged_us": lag}
    return {name: round(seconds * 1e6, 1) for name, seconds in figures.items()} | {"bytes": float(packed.nbytes)}


def token_times(delays: Sequence[float], num_tokens: int, cache: str) -> dict[float, float]:
    """Returns the median milliseconds between tokens for each message delay in milliseconds.

    Measures each delay twice and keeps the better value, because the machine may be busy.
    """
    found: dict[float, float] = {}
    with reserved_port() as step_port, tempfile.TemporaryDirectory() as folder:
        proxy = StepProxy(f"127.0.0.1:{step_port}")
        own = {0: [f"--step-port={step_port}"], 1: [f"--step-port={proxy.port}"]}
        flags = (*FLAGS, f"--cache-dir={cache}")
        with local_cluster(2, flags, Path(folder), own_flags=own) as cluster, Client(cluster.target) as client:
            cluster.wait_until_ready(client, READY_SECONDS)
            for delay in [*delays, *delays]:

                def hold(response: pb.JoinResponse, seconds: float = delay / 1e3) -> Iterable[pb.JoinResponse]:
                    if seconds and response.HasField("call"):
                        time.sleep(seconds)
                    return [response]

                proxy.spoil = hold
                times = [
                    time.perf_counter()
                    for _ in client.generate([300] * 8, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                ]
                gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
                found[delay] = min(found.get(delay, float("inf")), round(statistics.median(gaps) * 1e3, 2))
        proxy.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the step stream's cost, and whether the device hides it.")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument(
        "--delays",
        type=float,
        nargs="*",
        default=[0.0, 1.0, 2.0, 5.0, 10.0],
        help="delays of each message, in milliseconds",
    )
    parser.add_argument("--cache-dir", default="~/.cache/meshserve")
    options = parser.parse_args(arguments)
    for name, bucket in STEPS.items():
        for num_followers in (1, 3, 7):
            figures = cost(num_followers, bucket, options.calls)
            print(json.dumps({"step": name, "followers": num_followers} | figures), flush=True)
    if options.delays:
        times = token_times(options.delays, options.tokens, options.cache_dir)
        print(json.dumps({"milliseconds_between_tokens_by_delay": times}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
