"""Compares meshserve, through gRPC, with vLLM: the same batches of token ids on the same GPU, one engine at a time.

    meshserve bench full_load --models qwen3-0.6b qwen3-8b --python-vllm /opt/vllm/bin/python --markdown table.md
    meshserve bench full_load --models qwen3-8b --workloads 512 --tp 4 --engines ours --set-all max_running=512
    meshserve bench full_load --models qwen3-8b --starts 3 --python-vllm /opt/vllm/bin/python
    meshserve bench full_load --models qwen3-8b --quantize fp8-block --python-vllm /opt/vllm/bin/python
    meshserve bench full_load --models qwen3-8b --workloads 32 64x512x128 --engines ours offline
    meshserve bench full_load --models qwen3-0.6b --workloads nano-vllm --starts 3 --engines ours http

Every engine runs with its own defaults; vLLM is only given a context of 4,096 tokens and no prefix cache, which prompts
that never repeat cannot use. With --quantize, both quantize the random weights while they load them, vLLM with its
quantization="fp8". With --set, meshserve also runs with these options, with --set-all only. A meshserve server on GPUs
runs at most 256 requests at once by default, vLLM on a GPU of 70 GiB or more 1,024; with a workload of more requests
than that, they take turns, and "ms per output token" is no longer the time of a step. A ratio above 1 means that
meshserve is faster.
A workload 64x512x128 is 64 requests of 512 tokens in and 128 out. The engine "offline" is meshserve's without a server,
of a size for the largest batch: the difference is what the edge costs. The engine "http" is the server of "ours", asked
through OpenAI's API, streamed; beside "ours", a column has the ratio of the two.
With --starts, every engine is started that many times, in turn, and all figures are medians over the starts.
All figures of a table come from one run of this command, and its heading says where and when it ran.
"""

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.baselines.job import Batch, Report
from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading
from meshserve.benchmarks.lib.token_times import RunTimes, percentile
from meshserve.benchmarks.lib.workloads import MAX_TOKEN_ID, Work, fixed, nano_vllm

from .comparison import add_engine_options, engines_from, heading, run

_WARM_UP_SEED = 1_000_000  # seeds from here on are never timed
_PREFILL_SEED = 2_000_000
_SEEDS_OF_A_WORKLOAD = 10_000_000
_SIZES = re.compile(r"\d+x\d+x\d+")  # requests, tokens in and out of each
_DEMO_TOKEN_ID = 99  # within the vocabulary of the demo model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that start together.

    Attributes:
      title: Names it in the table.
      draw: Makes the requests from a seed.
      warm_up: The same for the untimed runs.
      num_warmups, num_runs: Each run has its own seed.
      has_prefill: All requests are alike, so that the same requests with a single output token time the prefill.
    """

    title: str
    draw: Callable[[int], list[Work]]
    warm_up: Callable[[int], list[Work]]
    temperature: float = 0.0
    num_warmups: int = 1
    num_runs: int = 3
    has_prefill: bool = True

    def batches(self) -> list[Batch]:
        """Returns the warm-ups, the timed runs, and the timed prefills."""
        warm_ups = [self.warm_up(_WARM_UP_SEED + run) for run in range(self.num_warmups)]
        # Seed 0 runs last: with nano-vllm's workload it is the published draw, and finds every batch size warmed up.
        runs = [self.draw(seed) for seed in reversed(range(self.num_runs))]
        prefills = [self.draw(_PREFILL_SEED + run) for run in range(self.num_runs if self.has_prefill else 0)]
        return [
            *(Batch(works, self.temperature, is_timed=False, has_token_times=False) for works in warm_ups),
            *(Batch(works, self.temperature, has_token_times=False) for works in runs),
            *(Batch([Work(ids, 1) for ids, _ in works], self.temperature, has_token_times=False) for works in prefills),
        ]

    def figures(self, runs: Sequence[RunTimes]) -> dict[str, float]:
        """Returns medians of the timed batches: tokens/s, and with `has_prefill` also its seconds and ms per step."""
        whole, prefills = runs[: self.num_runs], runs[self.num_runs :]
        found = {TOKENS_PER_SECOND: percentile([run.tokens_per_second for run in whole], 50)}
        if prefills:
            prefill = percentile([run.seconds for run in prefills], 50)
            num_steps = whole[0].num_tokens // prefills[0].num_tokens - 1
            seconds = percentile([run.seconds for run in whole], 50)
            found |= {STEP_MS: 1e3 * (seconds - prefill) / num_steps, PREFILL_SECONDS: prefill}
        return found


TOKENS_PER_SECOND, STEP_MS, PREFILL_SECONDS = "output tokens/s", "ms per output token", "prefill, s"
KV_TOKENS, START_SECONDS = "tokens that fit in the KV cache", "start, s"
_MORE_IS_BETTER = (TOKENS_PER_SECOND, KV_TOKENS)


def _alike(num_requests: int, num_in: int, num_out: int, max_id: int = MAX_TOKEN_ID, **rest: Any) -> Workload:
    def draw(seed: int) -> list[Work]:
        # With one seed for both, a larger workload would begin with the prompts of a smaller one, cached by then.
        return fixed(_SEEDS_OF_A_WORKLOAD * num_requests + seed, num_requests, num_in, num_out, max_id)

    title = f"{num_requests} x {num_in:,} in, {num_out} out"
    return Workload(title=title, draw=draw, warm_up=draw, **rest)


NANO_VLLM = Workload(
    title="nano-vllm's 256 requests",
    draw=lambda seed: nano_vllm(seed, 256, 100, 1024, MAX_TOKEN_ID),
    warm_up=lambda seed: nano_vllm(seed, 8, 4, 64, MAX_TOKEN_ID),
    temperature=0.6,
    num_runs=2,
    has_prefill=False,
)

WORKLOADS: Mapping[str, Mapping[str, Workload]] = {
    "qwen3-0.6b": {
        "one": _alike(1, 128, 256),
        "few": _alike(4, 32, 100, num_warmups=3, num_runs=10),
        "nano-vllm": NANO_VLLM,
    },
    "qwen3-8b": {
        "one": _alike(1, 128, 256),
        "32": _alike(32, 1024, 256),
        "128": _alike(128, 1024, 256),
        "256": _alike(256, 512, 512, num_runs=2),
        "512": _alike(512, 1024, 256),
    },
    "qwen3-32b": {"one": _alike(1, 128, 256), "32": _alike(32, 1024, 256), "128": _alike(128, 1024, 256)},
    "qwen3-30b-a3b": {
        "one": _alike(1, 128, 256),
        "8": _alike(8, 1024, 256),
        "32": _alike(32, 1024, 256),
        "128": _alike(128, 1024, 256),
        "256": _alike(256, 1024, 256),
    },
    "qwen3-235b-a22b": {"8": _alike(8, 1024, 256), "64": _alike(64, 1024, 256)},
    "demo": {"few": _alike(3, 12, 6, max_id=_DEMO_TOKEN_ID, num_runs=1)},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison and returns 1 if an engine failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    engines = engines_from(options, "vllm_engine")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    failures = 0
    with PowerWatch(is_gpu_expected=True) as watch, tempfile.TemporaryDirectory(prefix="meshserve-full-load-") as name:
        for model in options.models:
            chosen = _workloads(options, model)
            batches = [batch for workload in chosen.values() for batch in workload.batches()]
            starts: dict[str, list[dict[str, Any]]] = {}
            # In turn, so that a machine that becomes slower affects all engines.
            for number, key in itertools.product(range(1, options.starts + 1), options.engines):
                title = engines[key].title + (f", start {number}" if options.starts > 1 else "")
                result = run(options, engines[key], model, Path(name), batches)
                if isinstance(result, str):
                    failures += 1
                    print(f"{model}, {title}: {result}", file=sys.stderr, flush=True)
                    continue
                starts.setdefault(key, []).append(_results(result, chosen, watch))
                done = {model: {key: starts[key][-1]}}  # shown at once, in case a later engine does not end
                print(table(done, {key: title}), file=sys.stderr, flush=True)
            if starts:
                found[model] = {key: _medians(starts[key]) for key in options.engines if key in starts}
    versions = {result["version"] for results in found.values() for result in results.values()}
    titles = {key: engines[key].title for key in options.engines}
    text = heading("full_load", arguments, versions) + "\n\n" + table(found, titles)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=str))
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench full_load", description="Compare meshserve through gRPC with vLLM on one GPU."
    )
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["qwen3-0.6b", "qwen3-8b"])
    names = sorted({name for each in WORKLOADS.values() for name in each})
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", type=_workload_name,
        help=f"only these (default: all of the model): {', '.join(names)}, or REQUESTSxINxOUT",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=0, help="timed runs of each workload (default: its own number)")
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="starts of each engine, in turn; figures are medians (default: %(default)s)",
    )
    add_engine_options(parser, "http", "offline")
    return parser


def _workload_name(name: str) -> str:
    if _SIZES.fullmatch(name) or any(name in each for each in WORKLOADS.values()):
        return name
    raise argparse.ArgumentTypeError(f"{name!r} is neither a workload nor of the form 64x512x128")


def _workloads(options: argparse.Namespace, model: str) -> dict[str, Workload]:
    known = dict(WORKLOADS[model])
    for name in options.workloads or ():
        if _SIZES.fullmatch(name):
            num_requests, num_in, num_out = map(int, name.split("x"))
            max_id = _DEMO_TOKEN_ID if model == "demo" else MAX_TOKEN_ID
            known[name] = _alike(num_requests, num_in, num_out, max_id)
    return {
        name: dataclasses.replace(workload, num_runs=options.runs or workload.num_runs)
        for name, workload in known.items()
        if name in (options.workloads or known)
    }


def _results(report: Report, workloads: Mapping[str, Workload], watch: PowerWatch) -> dict[str, Any]:
    """Returns the figures of one engine and model, by workload, as `table` takes them."""
    figures: dict[str, dict[str, float]] = {}
    power: dict[str, Reading | None] = {}
    runs, spans = list(report.runs), list(report.spans)
    for workload in workloads.values():
        num_timed = sum(batch.is_timed for batch in workload.batches())
        figures[workload.title] = workload.figures(runs[:num_timed])
        power[workload.title] = watch.between(spans[0][0], spans[workload.num_runs - 1][1])
        runs, spans = runs[num_timed:], spans[num_timed:]
    figures["the server"] = {KV_TOKENS: report.kv_tokens, START_SECONDS: report.start_seconds}
    return {
        "version": report.version,
        "figures": figures,
        "power": {title: reading for title, reading in power.items() if reading is not None},
    }


def _medians(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns medians of what `_results` found at each start of one engine, and the figures of every start."""
    figures = [start["figures"] for start in starts]
    powers = [start["power"] for start in starts]
    return {
        "version": starts[0]["version"],
        "figures": {
            title: {name: statistics.median(each[title][name] for each in figures) for name in names}
            for title, names in figures[0].items()
        },
        "power": {
            title: Reading(
                *map(statistics.median, zip(*(dataclasses.astuple(each[title]) for each in powers), strict=True))
            )
            for title in powers[0]
            if all(title in each for each in powers)
        },
        "starts": figures,
    }


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]], titles: Mapping[str, str]) -> str:
    """Formats the figures as Markdown: a row per model, workload and figure; ratios where both have the figure.

    Args:
      found: By model and engine, `figures` by workload title and figure, and `power` by workload title.
      titles: The engines' titles, in the order of the columns.
    """
    pairs = [(key, "vllm") for key in titles if key != "vllm"]
    names_of_pairs = [f"{titles[key]} : vLLM" for key, _ in pairs]
    if {"http", "ours"} <= titles.keys():
        pairs.append(("http", "ours"))
        names_of_pairs.append("OpenAI's API : gRPC")
    columns = [*titles.values(), *names_of_pairs]
    lines = ["| model | workload | figure | " + " | ".join(columns) + " |", "|---" * (len(columns) + 3) + "|"]
    for model, results in found.items():
        first = next(iter(results.values()))["figures"]
        for workload, names in first.items():
            for name in names:
                values = {
                    key: result["figures"][workload][name]
                    for key, result in results.items()
                    if result["figures"].get(workload, {}).get(name)
                }
                cells = [_number(values[key], name) if key in values else "" for key in titles]
                cells += [_ratio(values.get(key), values.get(base), name) for key, base in pairs]
                lines.append(f"| {model} | {workload} | {name} | " + " | ".join(cells) + " |")
            powers = [str(results[key]["power"].get(workload, "")) if key in results else "" for key in titles]
            if any(powers):
                lines.append(
                    f"| {model} | {workload} | clock, power | " + " | ".join([*powers, *("" for _ in pairs)]) + " |"
                )
    return "\n".join(lines)


def _number(value: float, name: str) -> str:
    return f"{value:,.0f}" if name in _MORE_IS_BETTER else f"{value:.2f}"


def _ratio(value: float | None, base: float | None, name: str) -> str:
    if not value or not base:
        return ""
    return f"{value / base if name in _MORE_IS_BETTER else base / value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
