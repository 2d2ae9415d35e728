"""Defines the job that a baseline runs and the report it returns, as JSON between processes of different interpreters.

Uses only the standard library.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshserve.benchmarks.lib.open_loop import OpenLoop, RateResult, search_from
from meshserve.benchmarks.lib.token_times import RunTimes
from meshserve.benchmarks.lib.workloads import Work


class Batch(NamedTuple):
    """Requests that start together."""

    works: list[Work]
    temperature: float
    is_timed: bool = True  # otherwise a warm-up, which is run and not reported
    has_token_times: bool = True  # otherwise only the end of the batch matters, and an engine may report nothing before


class Started(NamedTuple):
    """A baseline that has loaded its model."""

    version: str
    run: Callable[[Batch], RunTimes]
    kv_tokens: int = 0  # that fit in its KV cache; 0 if it does not say
    # Searches for a rate, and shows a line for each that it ran; None if the engine takes whole batches only.
    search: Callable[[OpenLoop, Callable[[str], None]], list[RateResult]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one baseline."""

    model: str  # a published size, or a folder with config.json
    model_dir: str  # has config.json; the weights are random
    dtype: str
    is_single: bool  # one request at a time, where the engine has the choice
    batches: list[Batch]
    settings: dict[str, Any]  # specific to the engine
    open_loop: OpenLoop | None = None  # after the batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of one baseline.

    Attributes:
      runs: Times of the timed batches, in their order.
      spans: When each of them began and ended, by `time.perf_counter`, which processes of one host share.
      start_seconds: From the start of the process until the model could serve.
      rates: Results of the job's open loop, in the order in which its rates ran.
    """

    version: str
    runs: list[RunTimes]
    spans: list[tuple[float, float]]
    start_seconds: float
    kv_tokens: int
    rates: list[RateResult] = dataclasses.field(default_factory=list)


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job)))


def read_report(path: Path) -> Report:
    raw = json.loads(path.read_text())
    runs, rates = [RunTimes(**run) for run in raw["runs"]], [RateResult(**rate) for rate in raw["rates"]]
    return Report(**{**raw, "runs": runs, "rates": rates})


def serve_job(start: Callable[[Job], Started]) -> None:
    """Runs a baseline's job: loads the model with `start`, then runs the batches in their order, then the open loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--progress-fd", type=int, default=2, help="gets a line for each rate of an open loop")
    options = parser.parse_args()
    raw = json.loads(options.job.read_text())
    batches = [Batch([Work(*work) for work in works], *rest) for works, *rest in raw["batches"]]
    search = search_from(raw["open_loop"])
    began = time.perf_counter()
    started = start(Job(**{**raw, "batches": batches, "open_loop": search}))
    start_seconds = time.perf_counter() - began
    runs, spans = [], []
    for batch in batches:
        began = time.perf_counter()
        times = started.run(batch)
        if batch.is_timed:
            runs.append(times)
            spans.append((began, time.perf_counter()))
    rates = []
    if search is not None:
        assert started.search is not None, f"{started.version} takes whole batches only"
        rates = started.search(search, lambda line: _show(line, options.progress_fd))
    report = Report(
        version=started.version,
        runs=runs,
        spans=spans,
        start_seconds=start_seconds,
        kv_tokens=started.kv_tokens,
        rates=rates,
    )
    options.report.write_text(json.dumps(dataclasses.asdict(report)))


def _show(line: str, descriptor: int) -> None:
    os.write(descriptor, f"{line}\n".encode())
