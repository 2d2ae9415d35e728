"""Finds the highest request rate at which gaps between tokens stay short, for meshserve and vLLM on the same GPU.

    meshserve bench open_loop --model qwen3-8b --engines ours vllm --python-vllm /opt/vllm/bin/python --p99-ms 50

Requests arrive as a Poisson process, whether or not earlier ones have been answered. From `--rate`, the rate rises or
falls by half an octave until one meets the bounds and a higher one does not, and is then bisected; `--rates` runs given
ones instead. The bounds are P99s over all gaps and all first tokens; the latter tells a queue that grows. A rate ends
early once the P97 is beyond a bound. Both engines get the same arrival times and token ids at the same rate.

meshserve is reached through gRPC; of vLLM it is the engine of `vllm serve` in this process, without HTTP. Both run with
the defaults of their servers, apart from vLLM's context of 4,096 tokens and its prefix cache, which is off because no
prompt repeats. `meshserve.benchmarks.lib.open_loop` says how gaps and first tokens are counted.

Lengths are uniform around a mean, as in the random workload of vLLM's and SGLang's serving benchmarks; their means, 768
tokens in and 160 out, lie near those of MLPerf Inference's 8B workload (778 in, 73 out) and of chats (longer outputs).
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshserve.benchmarks.baselines.job import Report
from meshserve.benchmarks.lib.open_loop import OpenLoop, RateResult, highest_rate
from meshserve.benchmarks.lib.traffic import Lengths

from .comparison import Engine, add_engine_options, engines_from, heading, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the search on every engine and returns 1 if one failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    engines, search = engines_from(options, "vllm_served"), _search(options)
    reports: dict[str, Report] = {}
    with tempfile.TemporaryDirectory(prefix="meshserve-open-loop-") as folder:
        for key in options.engines:
            print(f"{options.model}, {engines[key].title}", file=sys.stderr, flush=True)
            found = run(options, engines[key], options.model, Path(folder), open_loop=search)
            if isinstance(found, str):
                print(f"{engines[key].title}: {found}", file=sys.stderr, flush=True)
                continue
            reports[key] = found
            best = highest_rate(found.rates, search.gap_ms)
            print(f"{best:.2f} requests/s, ready after {found.start_seconds:.1f} s", file=sys.stderr, flush=True)
    versions = {report.version for report in reports.values()}
    results = {key: report.rates for key, report in reports.items()}
    text = heading("open_loop", arguments, versions) + "\n\n" + table(search, results, engines)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        options.json.write_text(json.dumps({key: dataclasses.asdict(each) for key, each in reports.items()}, indent=1))
    return 0 if len(reports) == len(options.engines) else 1


def table(search: OpenLoop, results: Mapping[str, Sequence[RateResult]], engines: Mapping[str, Engine]) -> str:
    """Formats the results as two Markdown tables: the highest rates and their ratios, and a row per rate and engine."""
    best = {key: highest_rate(rates, search.gap_ms) for key, rates in results.items()}
    ours = [key for key in results if key != "vllm"]
    columns = [*(engines[key].title for key in results), *(f"{engines[key].title} : vLLM" for key in ours)]
    ratios = [f"{best[key] / best['vllm']:.2f}" if best.get("vllm") else "" for key in ours]
    lengths = f"{search.input_tokens} tokens in, {search.output_tokens} out"
    name = f"highest requests/s with a P99 of gaps of {search.gap_ms:g} ms, {lengths}"
    lines = [
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        f"| {name} | " + " | ".join([*(f"{rate:.1f}" for rate in best.values()), *ratios]) + " |",
        "",
        "| requests/s | engine | gaps, ms: P50, P99 | first token, ms: P50, P99 | tokens/s | tokens a message | |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = sorted((each.rate, engines[key].title, each) for key, rates in results.items() for each in rates)
    lines += [
        f"| {each.rate:.2f} | {title} | {each.gap_p50:.1f}, {each.gap_p99:.1f} | {each.first_p50:.0f}, "
        f"{each.first_p99:.0f} | {each.tokens_per_second:,.0f} | {each.num_tokens / max(1, each.num_messages):.2f} "
        f"| {each.verdict} |"
        for _, title, each in rows
    ]
    return "\n".join(lines)


def _search(options: argparse.Namespace) -> OpenLoop:
    return OpenLoop(
        input_tokens=str(options.input_tokens),
        output_tokens=str(options.output_tokens),
        first_rate=options.rate,
        rates=tuple(options.rates),
        num_rates=options.num_rates,
        arrival_seconds=options.seconds,
        warm_up_seconds=options.warm_up_seconds,
        max_seconds=options.max_seconds,
        gap_ms=options.p99_ms,
        first_ms=options.first_p99_ms,
        temperature=options.temperature,
        seed=options.seed,
        vocab_size=options.vocab_size,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench open_loop",
        description="Find the highest request rate within latency bounds, for meshserve and vLLM on one GPU.",
    )
    parser.add_argument("--model", default="qwen3-8b", help="a published size (default: %(default)s)")
    parser.add_argument(
        "--p99-ms", type=float, default=50.0, help="bound of gaps between tokens (default: %(default)g)"
    )
    parser.add_argument(
        "--first-p99-ms", type=float, default=500.0, help="bound of the time to the first token (default: %(default)g)"
    )
    parser.add_argument(
        "--rate", type=float, default=16.0, help="first requests/s of the search (default: %(default)g)"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="run these rates instead of a search")
    parser.add_argument("--num-rates", type=int, default=6, help="maximum of rates per engine (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals at each rate (default: %(default)g)")
    parser.add_argument(
        "--warm-up-seconds", type=float, default=4.0, help="of arrivals before, not timed (default: %(default)g)"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=90.0, help="for all rates of an engine (default: %(default)g)"
    )
    lengths = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:HIGH (default: %(default)s)"
    parser.add_argument("--input-tokens", type=Lengths.parse, default=Lengths.parse("uniform:512:1024"), help=lengths)
    parser.add_argument("--output-tokens", type=Lengths.parse, default=Lengths.parse("uniform:64:256"), help=lengths)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (default: %(default)s)")
    parser.add_argument(
        "--vocab-size", type=int, default=OpenLoop.vocab_size, help="token ids are below it (default: %(default)s)"
    )
    add_engine_options(parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
