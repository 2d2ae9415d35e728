"""Defines the job that a baseline runs and the report it returns, as JSON between processes of different interpreters.

Uses only the standard library.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.token_times import RunTimes
from meshserve.benchmarks.lib.workloads import Work

# Runs one batch.
Run = Callable[[list[Work]], RunTimes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one baseline; the first `num_warmups` batches are run but not reported."""

    model_dir: str  # has config.json; the weights are random
    dtype: str
    temperature: float
    is_single: bool  # one request at a time, where the engine has the choice
    num_warmups: int
    batches: list[list[Work]]
    settings: dict[str, Any]  # specific to the engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of one baseline."""

    version: str
    runs: list[RunTimes]


def write_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job)))


def read_report(path: Path) -> Report:
    raw = json.loads(path.read_text())
    return Report(version=raw["version"], runs=[RunTimes(**run) for run in raw["runs"]])


def serve_job(start: Callable[[Job], tuple[str, Run]]) -> None:
    """Runs a baseline's job; `start` loads the model and returns its version and a function that runs one batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    raw = json.loads(options.job.read_text())
    job = Job(**{**raw, "batches": [[Work(*work) for work in batch] for batch in raw["batches"]]})
    version, run = start(job)
    runs = [run(batch) for batch in job.batches][job.num_warmups :]
    options.report.write_text(json.dumps(dataclasses.asdict(Report(version=version, runs=runs))))
