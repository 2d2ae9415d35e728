"""Runs one baseline's job in a process of its own, with the interpreter in which its engine is installed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshserve.runtime.weights.registry import published_config

from .job import Job, Report, read_report, write_job

NOT_INSTALLED = "not installed"
_SAMPLE_SECONDS = 0.5
_EXCERPT_CHARACTERS = 4000
_OURS = ("ours", "ours_served", "ours_http")


def model_config_json(model: str) -> dict[str, Any]:
    """Returns the config.json of a published size, or of a folder that has one."""
    path = Path(model) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else published_config(model)


def run_engine(module: str, interpreter: str, job: Job, folder: Path, timeout: float) -> tuple[Report, int] | str:
    """Runs a job with a module of this package.

    Returns:
      The report and the peak memory in bytes, or the reason why there is none.
    """
    write_job(job, folder / "job.json")
    report = folder / "report.json"
    with _progress(job) as progress:
        arguments = [str(folder / "job.json"), str(report), *(f"--progress-fd={number}" for number in progress)]
        found = run_module(module, interpreter, arguments, report, timeout, progress)
    return found if isinstance(found, str) else (read_report(report), found)


def run_module(
    module: str, interpreter: str, arguments: Sequence[str], report: Path, timeout: float, pass_fds: Sequence[int] = ()
) -> int | str:
    """Runs a module of this package that writes a report into the folder of its log.

    Returns:
      The peak memory in bytes, or the reason why there is no report.
    """
    if shutil.which(interpreter) is None:
        return f"interpreter {interpreter} not found"
    if module.startswith("vllm") and not _has_vllm(interpreter):
        return NOT_INSTALLED
    report.unlink(missing_ok=True)
    environment = _environment(report.parent, module)
    with (report.parent / "log").open("w+", errors="replace") as log, _watched_memory() as watch:
        process = subprocess.Popen(
            [interpreter, "-m", f"meshserve.benchmarks.baselines.{module}", *arguments],
            env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=pass_fds,
            start_new_session=True,  # with the servers that it starts, which `_kill` also ends
        )  # fmt: skip
        peak_bytes = _wait(process, timeout, watch)
        log.seek(0)
        text = log.read()
    if process.returncode != 0 or not report.is_file():
        return f"failed with exit status {process.returncode}:\n{_excerpt(text)}"
    return peak_bytes


def _excerpt(log: str) -> str:
    """Returns the log's last traceback, after which a server may have logged much, and the log's end."""
    start = log.rfind("Traceback (most recent call last)")
    if start < 0 or start >= len(log) - _EXCERPT_CHARACTERS:
        return log[-_EXCERPT_CHARACTERS:]
    return f"{log[start : start + _EXCERPT_CHARACTERS]}\n...\n{log[-_EXCERPT_CHARACTERS:]}"


@contextlib.contextmanager
def _progress(job: Job) -> Iterator[tuple[int, ...]]:
    """Gives an open loop a descriptor for its progress: this process's stderr, because the engine's own is the log."""
    progress = () if job.open_loop is None else (os.dup(2),)
    try:
        yield progress
    finally:
        for number in progress:
            os.close(number)


def _environment(folder: Path, module: str) -> dict[str, str]:
    """Returns the environment of the engine's process.

    meshserve runs with this interpreter's packages. The other engines see our benchmarks and no other package of this
    interpreter. vLLM draws each token's experts at random, as random weights do here; with random FP8 weights its own
    router chose so few different experts that their comparison said nothing (docs/log/experts.md).
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if module.startswith("vllm"):
        environment.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    if module not in _OURS:
        package = folder / "packages" / "meshserve"
        if not package.exists():
            package.mkdir(parents=True)
            (package / "benchmarks").symlink_to(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = str(package.parent)
    return environment


def _has_vllm(interpreter: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([interpreter, "-c", code], capture_output=True).returncode == 0


class _GpuMemory:
    """Tracks the peak memory in use on all GPUs by nvidia-smi, above the initial use; 0 without nvidia-smi."""

    def __init__(self) -> None:
        self._first = self._read()
        self._most = self._first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def peak_bytes(self) -> int:
        return (self._most - self._first) if self._first is not None and self._most is not None else 0

    def start(self) -> None:
        if self._first is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._most = max(self._most or 0, self._read() or 0)

    @staticmethod
    def _read() -> int | None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return sum(int(line) << 20 for line in done.stdout.split())
        except (OSError, subprocess.CalledProcessError, ValueError):
            return None


@contextlib.contextmanager
def _watched_memory() -> Iterator[_GpuMemory]:
    watch = _GpuMemory()
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def _wait(process: subprocess.Popen, timeout: float, watch: _GpuMemory) -> int:
    """Waits for the process to end and returns the peak memory of the GPUs, or of the process if there is no GPU."""
    timer = threading.Timer(timeout, _kill, [process])
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:  # such as KeyboardInterrupt, which does not reach another session
        _kill(process)
        raise
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return watch.peak_bytes or usage.ru_maxrss * 1024


def _kill(process: subprocess.Popen) -> None:
    """Kills the process and all that it has started, which would hold the GPU's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
