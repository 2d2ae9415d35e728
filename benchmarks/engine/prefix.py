"""Counts the prefill tokens computed for many requests with one long prefix, without and with the prefix cache.

    python benchmarks/engine/prefix.py [--requests 64] [--prefix 1000] [--own 15] [--page-size 8]

Runs the demo model on one CPU device. The ideal computes the prefix once and, for each request, only its own tokens.
Each request computes a page that the prefix fills only partly, which explains the difference at page sizes that do not
divide the prefix.
"""

import argparse
import threading
import time
from collections.abc import Sequence

from meshserve.runtime.api.request import Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.launch import launch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="prefix", description="Count the prefill tokens of requests with a common prefix."
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens shared by all requests")
    parser.add_argument("--own", type=int, default=15, help="further tokens of each request")
    parser.add_argument("--page-size", type=int, default=8)
    parser.add_argument("--only-cached", action="store_true", help="skip the run without the cache")
    options = parser.parse_args(arguments)
    ideal = options.prefix + options.requests * options.own
    print(f"ideal: {ideal} prefill tokens")
    for has_cache in (True,) if options.only_cached else (False, True):
        num_tokens, seconds = _serve(options, has_cache)
        print(f"prefix cache {has_cache!s:5}: {num_tokens} prefill tokens, {num_tokens / ideal:.3f} of the ideal; "
              f"{seconds:.1f} s", flush=True)  # fmt: skip
    return 0


def _serve(options: argparse.Namespace, has_cache: bool) -> tuple[int, float]:
    """Returns the number of computed prefill tokens, and the seconds from the first request to the last end."""
    records: list[StepRecord] = []
    ended = threading.Semaphore(0)

    def deliver(outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                ended.release()

    num_request_pages = -(-(options.prefix + options.own + 1) // options.page_size)
    config = ServeConfig(
        model="demo", cpu_devices=1, page_size=options.page_size, num_pages=9 * num_request_pages, max_running=8,
        max_step_tokens=256, cache_dir="", prefix_cache=has_cache,
    )  # fmt: skip
    engine = launch(config, deliver, records.append).engine
    engine.start()
    started = time.monotonic()
    prefix = tuple(300 + index * index % 1500 for index in range(options.prefix))
    for number in range(options.requests):
        own = tuple(300 + (number * 31 + index) % 1500 for index in range(options.own))
        engine.submit(str(number), prefix + own, SamplingParams(max_tokens=2, seed=number, ignore_eos=True))
    for _ in range(options.requests):
        ended.acquire()
    seconds = time.monotonic() - started
    engine.stop()
    if engine.failure is not None:
        raise SystemExit(f"the engine failed: {engine.failure}")
    return sum(record.num_prefill_tokens for record in records), seconds


if __name__ == "__main__":
    raise SystemExit(main())
