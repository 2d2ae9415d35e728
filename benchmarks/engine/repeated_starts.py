"""Times several starts, each in its own process and followed by traffic that fills the whole cache.

    meshserve bench repeated_starts --model qwen3-8b --random-weights --starts 20 --fill-last
    meshserve bench repeated_starts --model demo --cpu-devices 4 --tp 4 --num-pages 500

Accepts all options of `serve` that change the engine, including those for the memory, with the same defaults. The first
start compiles the programs (into a cache folder of its own, unless --cache-dir names one), and the others find them on
disk. Reports for each start: seconds to ready, programs, those that were loaded without tracing, compiles, hits and
misses of jax's cache, pages, and the throughput of the traffic. With --fill-last only the last start fills its cache,
while the others compute one prompt per slot. Exits with 1 if a start fails, anything compiles after ready, a request
ends in an unexpected way, a page is leaked, or a cache that should have been full was not. Does not need the gRPC
package.
"""

import argparse
import dataclasses
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from meshserve.runtime.api.request import FinishReason, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.flags import Parser, add_options, serve_config
from meshserve.runtime.options.serve_config import server_only_options
from meshserve.runtime.program.compile_cache import CompileWatch
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.resolve.resolved_server import ResolvedServer
from meshserve.runtime.startup.launch import build_engine, open_model
from meshserve.runtime.telemetry.logs import configure_logs

_OUTPUT_TOKENS = 32
_MAX_PROMPT_TOKENS = 1024
_MAX_WAITING = 1_000_000  # all requests are submitted at once
_COLUMNS = (
    "ready_seconds",
    "programs",
    "loaded",
    "compiles",
    "cache_hits",
    "cache_misses",
    "pages",
    "evicted_pages",
    "tokens_per_second",
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    if options.once:
        configure_logs("text")
        report = start_once(options)
        print(json.dumps(report))
        return 0 if report["is_clean"] else 1
    with tempfile.TemporaryDirectory() as cache:
        own_cache = [] if hasattr(options, "cache_dir") else [f"--cache-dir={cache}"]
        reports = []
        for index in range(options.starts):
            unfilled = ["--fill=0"] if options.fill_last and index < options.starts - 1 else []
            reports.append(_start(index, [*arguments, *own_cache, *unfilled], options.timeout))
    num_failed = sum(not report["is_clean"] for report in reports)
    print(f"{len(reports) - num_failed} of {len(reports)} starts succeeded")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(reports, file, indent=1)
    return 1 if num_failed else 0


def _parser() -> Parser:
    parser = Parser(
        prog="meshserve bench repeated_starts", description="Time starts, each followed by traffic at a full cache."
    )
    add_options(parser, left_out=server_only_options())
    parser.add_argument(
        "--starts", type=int, default=3, help="number of starts, one after the other (default: %(default)s)"
    )
    parser.add_argument(
        "--fill",
        type=float,
        default=1.1,
        help="tokens to compute, as a multiple of the cache size; at least one prompt per slot (default: %(default)s)",
    )
    parser.add_argument("--fill-last", action="store_true", help="fill the cache after the last start only")
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        help="time limit for a start and its traffic, in seconds (default: %(default)s)",
    )
    parser.add_argument("--json", help="also write the reports to this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)  # runs one start in this process
    return parser


def _start(index: int, arguments: list[str], timeout_seconds: float) -> dict[str, Any]:
    """Runs one start in its own process and prints a row."""
    command = [sys.executable, "-m", "meshserve.benchmarks.engine.repeated_starts", *arguments, "--once"]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_seconds, check=False)
        lines = ended.stdout.splitlines()
        report = json.loads(lines[-1]) if lines else {"failure": f"exit status {ended.returncode}; see above"}
    except subprocess.TimeoutExpired:
        report = {"failure": f"not finished after {timeout_seconds:g} s"}
    report.setdefault("is_clean", False)
    if not index:
        print("".join(f"{name:>18}" for name in ("start", *_COLUMNS)), flush=True)
    row = "".join(f"{report.get(name, '-'):>18}" for name in _COLUMNS)
    print(f"{index:>18}{row}{'' if report['is_clean'] else '  ' + str(report.get('failure') or report)}", flush=True)
    return report


def start_once(options: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine, fills its cache and stops it; never raises, but reports an error as `failure`."""
    try:
        config = dataclasses.replace(serve_config(options), max_waiting=_MAX_WAITING)
        model, make_params = open_model(config.model, random_weights=config.random_weights)
        crowd = Crowd()
        with CompileWatch(is_strict=True) as watch:
            started = time.monotonic()
            engine, server = build_engine(config, model, make_params, None, crowd.deliver, crowd.record)
            ready_seconds = time.monotonic() - started
            engine.start()
            watch.ready()
            traffic_seconds = crowd.run(engine, server, options.fill)
            report = _report(engine, crowd, watch, is_filled=options.fill > 0)
            engine.stop()
    except Exception as error:
        return {"is_clean": False, "failure": f"{type(error).__name__}: {error}"}
    seconds = {"ready_seconds": round(ready_seconds, 2), "traffic_seconds": round(traffic_seconds, 1)}
    return report | seconds | {"tokens_per_second": round(crowd.num_tokens / traffic_seconds)}


class Crowd:
    """Requests that are all submitted at once, enough of them to fill the cache."""

    def __init__(self) -> None:
        self._all_ended = threading.Event()
        self._num_open = 0
        self.num_requests = 0
        self.num_tokens = 0  # computed, of prompts and outputs
        self.num_evicted_pages = 0
        self.faults: list[str] = []

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish_reason is None:
                continue
            self._num_open -= 1
            self.num_tokens += output.num_prompt_tokens + output.num_output_tokens
            if output.finish_reason is not FinishReason.LENGTH or output.num_output_tokens != _OUTPUT_TOKENS:
                self.faults.append(f"request {output.request_id} ended with {output}")
        if not self._num_open:
            self._all_ended.set()

    def record(self, record: StepRecord) -> None:
        self.num_evicted_pages += record.num_evicted_pages

    def run(self, engine: Engine, server: ResolvedServer, fill: float) -> float:
        """Submits requests with `fill` times the tokens of the cache and returns the seconds until all have ended."""
        draw, limits = random.Random(0), server.limits
        cache_tokens = engine.load().num_pages * limits.page_size
        room = min(limits.max_context, cache_tokens) - _OUTPUT_TOKENS
        if room < 1:
            raise ValueError(f"a cache of {cache_tokens} tokens holds no request; raise --num-pages or --max-context.")
        num_prompt_tokens = min(_MAX_PROMPT_TOKENS, room)
        wanted = max(limits.max_running, math.ceil(fill * cache_tokens / (num_prompt_tokens + _OUTPUT_TOKENS)))
        self.num_requests = self._num_open = wanted
        params = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        started = time.monotonic()
        for index in range(wanted):
            prompt = [draw.randrange(server.model.vocab_size) for _ in range(num_prompt_tokens)]
            engine.submit(str(index), prompt, params)
        while not self._all_ended.wait(0.2) and engine.failure is None:
            pass
        return time.monotonic() - started


def _report(engine: Engine, crowd: Crowd, watch: CompileWatch, *, is_filled: bool) -> dict[str, Any]:
    assert isinstance(engine.runner, StepRunner)
    load, counts = engine.load(), watch.counts
    faults = list(crowd.faults[:3])
    if engine.failure is not None:
        faults.append(engine.failure)
    if counts.num_late_compiles:
        faults.append(f"{counts.num_late_compiles} compiles after ready")
    if load.num_free_pages != load.num_pages:
        faults.append(f"{load.num_pages - load.num_free_pages} pages are not free at the end")
    if is_filled and not crowd.num_evicted_pages:
        faults.append("the cache was never full, nothing was evicted; raise --fill")
    return {
        "is_clean": not faults,
        "failure": "; ".join(faults),
        "programs": engine.runner.figures.num_programs,
        "loaded": counts.num_loaded,
        "compiles": counts.num_compiles,
        "cache_hits": counts.num_cache_hits,
        "cache_misses": counts.num_cache_misses,
        "late_compiles": counts.num_late_compiles,
        "pages": load.num_pages,
        "evicted_pages": crowd.num_evicted_pages,
        "requests": crowd.num_requests,
        "tokens": crowd.num_tokens,
    }


if __name__ == "__main__":
    raise SystemExit(main())
