"""Runs a benchmark or test of the table as processes of their own, with a time limit that holds for all their children.

NVLink multicast is switched off for every process: a program that uses it can put the GPUs of a host out of service.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0  # between SIGTERM and SIGKILL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A process of this interpreter.

    Attributes:
      module: What `python -m` runs.
      arguments: Its arguments, without the one that names the file of its results.
      result_flag: That argument, up to the file name.
      environment: Additional environment variables.
    """

    module: str
    arguments: tuple[str, ...]
    result_flag: str = "--json="
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def command(self, result: Path) -> list[str]:
        return [sys.executable, "-m", self.module, *self.arguments, f"{self.result_flag}{result}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the tasks of a row ended."""

    results: list[Path]  # from the tasks that wrote one
    seconds: float
    problem: str = ""  # empty if all tasks succeeded


def run_tasks(tasks: Sequence[Task], folder: Path, name: str, limit_seconds: float) -> Outcome:
    """Runs tasks at the same time, each with a log file `NAME[-N].log` in the folder, and waits for all of them."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        running, results, logs = [], [], []
        for index, task in enumerate(tasks):
            stem = name if len(tasks) == 1 else f"{name}-{index + 1}"
            result = folder / f"{stem}{'.xml' if 'xml' in task.result_flag else '.json'}"
            result.unlink(missing_ok=True)
            log = stack.enter_context((folder / f"{stem}.log").open("w"))
            environment = {**os.environ, **NO_MULTICAST, **task.environment}
            running.append(
                subprocess.Popen(
                    task.command(result), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env=environment, start_new_session=True,
                )
            )  # fmt: skip
            results.append(result)
            logs.append(Path(log.name))
        try:
            ended_in_time = [_wait(process, began + limit_seconds) for process in running]
        finally:
            for process in running:
                end_group(process)
    problems = [
        f"ran longer than {limit_seconds:.0f} s, see {log.name}" if not in_time
        else f"exit status {process.returncode}, see {log.name}"
        for process, in_time, log in zip(running, ended_in_time, logs, strict=True)
        if process.returncode != 0 or not in_time
    ]  # fmt: skip
    found = [result for result in results if result.is_file()]
    return Outcome(results=found, seconds=time.monotonic() - began, problem="; ".join(problems))


def _wait(process: subprocess.Popen, deadline: float) -> bool:
    """Waits until the process ends or the deadline has passed; returns whether it ended by itself."""
    while process.poll() is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def end_group(process: subprocess.Popen) -> None:
    """Ends a process that leads a session, and all of its children: servers and engines hold GPU memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        while _is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    process.wait()


def _is_alive(group: int) -> bool:
    """Returns whether a process group has a process that has not ended; zombies have."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
