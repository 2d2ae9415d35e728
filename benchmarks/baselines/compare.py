"""Runs the baselines one after the other on the same machine and prints one table."""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.token_times import percentile
from meshserve.benchmarks.lib.workloads import MAX_TOKEN_ID, Work, fixed, nano_vllm
from meshserve.runtime.weights.registry import published_config

from .job import Job, Report, read_report, write_job

_GIB = 1 << 30
_SAMPLE_SECONDS = 0.5
_NANO_VLLM_LENGTHS = (100, 1024)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """How one engine of the comparison is run."""

    title: str
    module: str
    interpreter: str  # the command line option that names the interpreter
    is_single: bool = False


BASELINES = {
    "hf-single": Baseline("Hugging Face, one by one", "hugging_face", "python_hf", is_single=True),
    "hf-batched": Baseline("Hugging Face, batched", "hugging_face", "python_hf"),
    "vllm": Baseline("vLLM", "vllm_engine", "python_vllm"),
    "ours": Baseline("meshserve", "ours", "python_ours"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one engine: medians over all runs, plus P10 and P90 of the throughput."""

    title: str
    version: str
    tokens_per_second: float
    tokens_per_second_p10: float
    tokens_per_second_p90: float
    first_token_ms: float
    gap_ms_p50: float
    gap_ms_p99: float
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison and returns 1 if a baseline failed; a baseline that is not installed is only reported."""
    options = _parser().parse_args(arguments)
    config = _model_config(options.model)
    batches = _batches(options, config["vocab_size"])
    rows: dict[str, Row] = {}
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="meshserve-baselines-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for name in options.engines:
            found = _run_baseline(options, BASELINES[name], batches, Path(folder))
            if isinstance(found, Row):
                rows[name] = found
            else:
                problems[name] = found
            print(f"{BASELINES[name].title}: {'done' if name in rows else problems[name]}", file=sys.stderr, flush=True)
    num_input, num_output = (
        sum(len(work.prompt_token_ids) for work in batches[-1]), sum(work.max_tokens for work in batches[-1])
    )  # fmt: skip
    print(
        f"{options.model}, random weights, {options.dtype}: {len(batches[-1])} requests, {num_input:,} tokens in, "
        f"{num_output:,} out, temperature {options.temperature}; median of {options.runs} runs after {options.warmups}"
    )
    print(table(rows, options.baseline))
    if options.json:
        options.json.write_text(json.dumps({name: dataclasses.asdict(row) for name, row in rows.items()}, indent=1))
    return 1 if any(problem != "not installed" for problem in problems.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench baselines", description="Compare baselines side by side on one device."
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a published size, or a folder with config.json")
    parser.add_argument("--workload", choices=("fixed", "nano-vllm"), default="fixed")
    parser.add_argument("--requests", type=int, default=0, help="default: 4, or 256 with --workload nano-vllm")
    parser.add_argument("--input-tokens", type=int, default=32, help="with --workload fixed")
    parser.add_argument("--output-tokens", type=int, default=100, help="with --workload fixed")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--runs", type=int, default=10, help="number of measured runs, each with new prompts")
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--engines", nargs="+", choices=BASELINES, default=list(BASELINES), metavar="BASELINE", help=" ".join(BASELINES)
    )
    parser.add_argument(
        "--baseline", choices=BASELINES, default="hf-batched", help="the engine that the last column compares with"
    )
    for name in ("hf", "vllm", "ours"):
        parser.add_argument(
            f"--python-{name}", default=sys.executable, help="interpreter for this engine (default: the current one)"
        )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--set-vllm", default="{}", metavar="JSON", help="additional arguments of vllm.LLM")
    parser.add_argument("--timeout", type=float, default=3600.0, help="time limit per baseline, in seconds")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def _model_config(model: str) -> dict[str, Any]:
    path = Path(model) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else published_config(model)


def _batches(options: argparse.Namespace, vocab_size: int) -> list[list[Work]]:
    """Returns the batches of all runs; the last batch has seed 0."""
    seeds = reversed(range(options.warmups + options.runs))
    max_id = min(MAX_TOKEN_ID, vocab_size - 1)
    if options.workload == "nano-vllm":
        return [nano_vllm(seed, options.requests or 256, *_NANO_VLLM_LENGTHS, max_id) for seed in seeds]
    lengths = (options.input_tokens, options.output_tokens)
    return [fixed(seed, options.requests or 4, *lengths, max_id) for seed in seeds]


def _run_baseline(
    options: argparse.Namespace, baseline: Baseline, batches: list[list[Work]], folder: Path
) -> Row | str:
    """Returns the table row, or the reason why there is none."""
    interpreter = getattr(options, baseline.interpreter)
    environment = _environment(folder, baseline)
    if shutil.which(interpreter) is None:
        return f"interpreter {interpreter} not found"
    if baseline.module == "vllm_engine" and not _has_vllm(interpreter):
        return "not installed"
    job = Job(
        model_dir=str(folder),
        dtype=options.dtype,
        temperature=options.temperature,
        is_single=baseline.is_single,
        num_warmups=options.warmups,
        batches=batches,
        settings=_settings(options, baseline),
    )
    write_job(job, folder / "job.json")
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [
        interpreter,
        "-m",
        f"meshserve.benchmarks.baselines.{baseline.module}",
        str(folder / "job.json"),
        str(report),
    ]
    with (folder / "log").open("w+") as log, _watched_memory() as watch:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        peak_bytes = _wait(process, options.timeout, watch)
        log.seek(max(0, log.tell() - 4000))
        tail = log.read()
    if process.returncode != 0 or not report.is_file():
        return f"failed with exit status {process.returncode}:\n{tail}"
    return _row(baseline, read_report(report), peak_bytes)


def _environment(folder: Path, baseline: Baseline) -> dict[str, str]:
    """Returns the environment of the engine's process.

    meshserve runs with this interpreter's packages. The other engines see our benchmarks and no other package of this
    interpreter.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if baseline.module != "ours":
        package = folder / "packages" / "meshserve"
        if not package.exists():
            package.mkdir(parents=True)
            (package / "benchmarks").symlink_to(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = str(package.parent)
    return environment


def _has_vllm(interpreter: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([interpreter, "-c", code], capture_output=True).returncode == 0


def _settings(options: argparse.Namespace, baseline: Baseline) -> dict[str, Any]:
    if baseline.module == "ours":
        from meshserve.benchmarks.lib.offline_engine import parse_settings

        return parse_settings(options.set)
    return json.loads(options.set_vllm) if baseline.module == "vllm_engine" else {}


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
    """Waits for the process to end and returns its peak memory: of the GPUs, or of the process if there is no GPU."""
    timer = threading.Timer(timeout, process.kill)
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return watch.peak_bytes or usage.ru_maxrss * 1024


def _row(baseline: Baseline, report: Report, peak_bytes: int) -> Row:
    rates = [run.tokens_per_second for run in report.runs]
    gaps = [gap for run in report.runs for gap in run.gap_seconds]
    return Row(
        title=baseline.title,
        version=report.version,
        tokens_per_second=percentile(rates, 50),
        tokens_per_second_p10=percentile(rates, 10),
        tokens_per_second_p90=percentile(rates, 90),
        first_token_ms=1e3 * percentile([second for run in report.runs for second in run.first_seconds], 50),
        gap_ms_p50=1e3 * percentile(gaps, 50),
        gap_ms_p99=1e3 * percentile(gaps, 99),
        peak_bytes=peak_bytes,
    )


def table(rows: dict[str, Row], baseline: str) -> str:
    """Formats the rows as Markdown; the last column is the throughput relative to the baseline, if it has a row."""
    lines = [
        "| | tokens/s (P10 to P90) | first token, ms | between tokens, ms: p50, p99 | peak memory, GiB | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        ratio = f"{row.tokens_per_second / rows[baseline].tokens_per_second:.2f}" if baseline in rows else ""
        spread = f"{row.tokens_per_second_p10:,.1f} to {row.tokens_per_second_p90:,.1f}"
        lines.append(
            f"| {row.title} ({row.version}) | {row.tokens_per_second:,.1f} ({spread}) | {row.first_token_ms:.1f} "
            f"| {row.gap_ms_p50:.2f}, {row.gap_ms_p99:.2f} | {row.peak_bytes / _GIB:.2f} | {ratio} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
