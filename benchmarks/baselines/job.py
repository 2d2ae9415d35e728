"""What a peer is asked to run, and what it reports: JSON between processes of different interpreters. Standard library
only."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.token_times import RunTimes
from meshserve.benchmarks.lib.workloads import Work

# Runs a batch.
Run = Callable[[list[Work]], RunTimes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The first `num_warmups` of the batches are run, and forgotten."""

    model_dir: str  # has config.json; the weights are random
    dtype: str
    temperature: float
    is_single: bool  # one request at a time, where the peer can choose
    num_warmups: int
    batches: list[list[Work]]
    settings: dict[str, Any]  # the peer's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What came of it."""

    version: str
    runs: list[RunTimes]


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job)))


def read_report(path: Path) -> Report:
    raw = json.loads(path.read_text())
    return Report(version=raw["version"], runs=[RunTimes(**run) for run in raw["runs"]])


def serve_job(start: Callable[[Job], tuple[str, Run]]) -> None:
    """The main function of a peer: `start` loads the model and returns its version and a function that runs a batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    raw = json.loads(options.job.read_text())
    job = Job(**{**raw, "batches": [[Work(*work) for work in batch] for batch in raw["batches"]]})
    version, run = start(job)
    runs = [run(batch) for batch in job.batches][job.num_warmups :]
    options.report.write_text(json.dumps(dataclasses.asdict(Report(version=version, runs=runs))))
