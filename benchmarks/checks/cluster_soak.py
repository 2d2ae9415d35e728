"""Runs mixed load on a local cluster, compares its tokens with one process, and measures the step stream's cost.

    python benchmarks/checks/cluster_soak.py --processes 2 --seconds 600

One process first answers a set of requests. Several processes of the same mesh then answer them again and again, in
random order and mixture, and a quarter of the requests are cancelled midway. Every token is compared. Exits with 1 if a
token differs, a request ends with an error, a page is leaked, or a process does not shut down cleanly.
"""

import argparse
import json
import random
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshserve.runtime.client.client import CallError, Client
from meshserve.runtime.commands.local_cluster import LocalCluster, local_cluster

TP = 4
FLAGS = (
    "--model=demo", f"--tp={TP}", "--dtype=float32", "--page-size=16", "--max-running=4", "--max-step-tokens=4",
    "--num-pages=32", "--no-logits-processors",
)  # fmt: skip
NUM_REQUESTS = 32
READY_SECONDS = 300.0
SETTLE_SECONDS = 10.0
_STATS = re.compile(
    r"(\d+) calls; (\d+) us each to send, acknowledged (-?\d+) us after our own result; the longest took (\S+) s"
)


@dataclass(frozen=True)
class Asked:
    """One request of the set."""

    prompt: list[int]
    sampling: dict[str, Any]


def requests() -> list[Asked]:
    draw = random.Random(0)
    return [
        Asked(
            prompt=[draw.randrange(300, 2000) for _ in range(draw.randint(1, 40))],
            sampling={
                "max_tokens": draw.randint(4, 80),
                "temperature": draw.choice([0.0, 0.7, 1.0]),
                "top_k": draw.choice([0, 20]),
                "top_p": draw.choice([1.0, 0.9]),
                "seed": index,
                "ignore_eos": True,
            },
        )
        for index in range(NUM_REQUESTS)
    ]


@dataclass
class Tally:
    """The workers' results, guarded by `lock`."""

    num_whole: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def worker(
    target: str, asked: list[Asked], expected: list[tuple[int, ...]], tally: Tally, end: float, seed: int
) -> None:
    """Sends requests one after the other until the end time."""
    draw = random.Random(seed)
    with Client(target) as client:
        while time.monotonic() < end:
            index = draw.randrange(len(asked))
            cut = draw.randint(1, len(expected[index])) if draw.random() < 0.25 else None
            made: tuple[int, ...] = ()
            problem = ""
            try:
                for chunk in client.generate(asked[index].prompt, **asked[index].sampling):
                    made += chunk.token_ids
                    if cut is not None and len(made) >= cut:
                        break
            except CallError as error:
                problem = f"request {index}: {error}"
            if made != expected[index][: len(made)] or (cut is None and made != expected[index]):
                problem = problem or f"request {index}: got {made}, expected {expected[index]}"
            with tally.lock:
                tally.num_tokens += len(made)
                tally.num_whole += cut is None
                tally.num_cancelled += cut is not None
                if problem:
                    tally.problems.append(problem)
                    return
            time.sleep(draw.uniform(0.0, 0.5))


def references(asked: list[Asked], folder: Path, cache: str) -> list[tuple[int, ...]]:
    """Returns the answers of a single process."""
    with local_cluster(1, (*FLAGS, cache, f"--cpu-devices={TP}"), folder) as alone, Client(alone.target) as client:
        alone.wait_until_ready(client, READY_SECONDS)
        return [client.complete(each.prompt, **each.sampling).token_ids for each in asked]


def soak(cluster: LocalCluster, options: argparse.Namespace, expected: list[tuple[int, ...]]) -> Tally:
    asked, tally, end = requests(), Tally(), time.monotonic() + options.seconds
    threads = [
        threading.Thread(target=worker, args=(cluster.target, asked, expected, tally, end, seed))
        for seed in range(options.concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Client(cluster.target) as client:
        settled = time.monotonic() + SETTLE_SECONDS
        while (load := client.load()).num_free_pages < load.num_pages and time.monotonic() < settled:
            time.sleep(0.1)
    if load.num_free_pages < load.num_pages:
        tally.problems.append(f"only {load.num_free_pages} of {load.num_pages} pages are free at the end")
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run mixed load on a local cluster.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--concurrency", type=int, default=6, help="number of requests open at a time (default: %(default)s)"
    )
    parser.add_argument("--fail-seconds", type=float, default=10.0)
    parser.add_argument("--cache-dir", default="~/.cache/meshserve")
    options = parser.parse_args(arguments)
    cache = f"--cache-dir={options.cache_dir}"
    with tempfile.TemporaryDirectory() as name:
        alone, together = Path(name, "alone"), Path(name, "together")
        alone.mkdir()
        together.mkdir()
        expected = references(requests(), alone, cache)
        limit = f"--fail-seconds={options.fail_seconds:g}"
        flags = (*FLAGS, cache, limit, f"--cpu-devices={TP // options.processes}")
        with local_cluster(options.processes, flags, together) as cluster:
            with Client(cluster.target) as client:
                cluster.wait_until_ready(client, READY_SECONDS)
            tally = soak(cluster, options, expected)
            statuses = cluster.stop()
            said = _STATS.search(cluster.log(0).read_text())
    if any(statuses):
        tally.problems.append(f"exit statuses {statuses}")
    report = {
        "processes": options.processes,
        "seconds": options.seconds,
        "whole": tally.num_whole,
        "cancelled": tally.num_cancelled,
        "tokens": tally.num_tokens,
        "calls": int(said[1]) if said else None,
        "send_us_a_call": int(said[2]) if said else None,
        "acknowledged_us_after_own_result": int(said[3]) if said else None,
        "longest_call_seconds": float(said[4]) if said else None,
        "problems": tally.problems[:10],
        "num_problems": len(tally.problems),
    }
    print(json.dumps(report, indent=1))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
