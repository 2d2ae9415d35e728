"""Runs the baselines one after the other on the same machine and prints one table."""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.token_times import percentile
from meshserve.benchmarks.lib.workloads import MAX_TOKEN_ID, Work, fixed, nano_vllm

from .engine_process import model_config_json, run_engine
from .job import Batch, Job, Report

_GIB = 1 << 30
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
    config = model_config_json(options.model)
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
    num_warmups = options.warmups
    job = Job(
        model=options.model,
        model_dir=str(folder),
        dtype=options.dtype,
        is_single=baseline.is_single,
        batches=[
            Batch(batch, options.temperature, is_timed=index >= num_warmups) for index, batch in enumerate(batches)
        ],
        settings=_settings(options, baseline, batches),
    )
    found = run_engine(baseline.module, getattr(options, baseline.interpreter), job, folder, options.timeout)
    return found if isinstance(found, str) else _row(baseline, *found)


def _settings(options: argparse.Namespace, baseline: Baseline, batches: list[list[Work]]) -> dict[str, Any]:
    if baseline.module == "ours":
        from meshserve.benchmarks.lib.offline_engine import parse_settings

        return parse_settings(options.set)
    if baseline.module == "vllm_engine":
        longest = max(len(work.prompt_token_ids) + work.max_tokens for batch in batches for work in batch)
        return {"max_model_len": longest, "max_num_seqs": max(map(len, batches)), **json.loads(options.set_vllm)}
    return {}


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
