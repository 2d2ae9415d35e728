"""Counts the prefill tokens computed for many requests with one long prefix, without and with the prefix cache.

    python benchmarks/engine/prefix.py [--requests 64] [--prefix 1000] [--own 15] [--page-size 8]
    python benchmarks/engine/prefix.py --host-cache-gib 32 --model qwen3-8b --random-weights --prefix 30000
    python benchmarks/engine/prefix.py --host-cache-gib 48 --model qwen3-8b --random-weights --prefix 0 --users 24

The second form measures prefixes that have left the devices, on whatever devices the machine has: the time of the first
token computed, kept and restored from host memory, the rates of copies, and decodes beside copies. The third serves
conversations that grow turn by turn to twice what the devices hold, with and without host memory (`--sides`), and says
how long steps of each kind took. With `--python-vllm`, vLLM serves them first, in a process for each side, with as many
tokens on the device and its own offloading to as much host memory.

The first form runs the demo model on one CPU device. The ideal computes the prefix once and, for each request, only its
own tokens. Each request computes a page that the prefix fills only partly, which explains the difference at page sizes
that do not divide the prefix.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.baselines.engine_process import model_config_json, run_module
from meshserve.benchmarks.lib.conversations import SIDES, measure_conversations
from meshserve.benchmarks.lib.gpu_power import PowerWatch, at_power
from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.restored_prefix import EngineClock, measure_prefix
from meshserve.benchmarks.lib.workloads import AT_A_TIME
from meshserve.runtime.api.request import Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.launch import launch

_VLLM_BLOCK_TOKENS = 16  # its default


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="prefix", description="Count the prefill tokens of requests with a common prefix."
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens shared by all requests")
    parser.add_argument("--own", type=int, default=15, help="further tokens of each request")
    parser.add_argument("--page-size", type=int, default=8)
    parser.add_argument("--only-cached", action="store_true", help="skip the run without the cache")
    host = parser.add_argument_group("prefixes that have left the devices")
    host.add_argument("--host-cache-gib", type=float, default=0.0, help="measure them, with so much host memory")
    host.add_argument("--model", default="demo", help="a model as for `serve`; also a published size such as qwen3-8b")
    host.add_argument("--random-weights", action="store_true")
    host.add_argument("--decodes", type=int, default=32, help="requests that decode beside the copies")
    host.add_argument("--decode-tokens", type=int, default=512, help="tokens of each of them")
    host.add_argument(
        "--users", type=int, default=0, help="measure conversations of so many users, too; alone with --prefix 0"
    )
    host.add_argument("--turns", type=int, default=8, help="turns of each conversation")
    host.add_argument("--turn-tokens", type=int, default=2000, help="tokens by which a turn is longer than the last")
    host.add_argument("--at-a-time", type=int, default=AT_A_TIME, help="turns that run at the same time")
    host.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        default=SIDES,
        help="measure conversations with host memory and without, in this order",
    )
    host.add_argument("--python-vllm", default="", help="serve conversations with the vLLM of this interpreter, too")
    host.add_argument("--set-vllm", default="{}", metavar="JSON", help="further arguments of vllm.LLM")
    host.add_argument("--only-vllm", action="store_true", help="do not run meshserve")
    host.add_argument("--timeout", type=float, default=3600.0, help="time limit of a vLLM process, in seconds")
    host.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the server")
    options = parser.parse_args(arguments)
    if options.host_cache_gib:
        _measure_host_cache(options)
        return 0
    ideal = options.prefix + options.requests * options.own
    print(f"ideal: {ideal} prefill tokens")
    for has_cache in (True,) if options.only_cached else (False, True):
        num_tokens, seconds = _serve(options, has_cache)
        print(f"prefix cache {has_cache!s:5}: {num_tokens} prefill tokens, {num_tokens / ideal:.3f} of the ideal; "
              f"{seconds:.1f} s", flush=True)  # fmt: skip
    return 0


def _measure_host_cache(options: argparse.Namespace) -> None:
    """Measures prefixes of which the devices hold two, and conversations of which they hold half, unless told else."""
    longest = max(options.prefix + options.decode_tokens, options.turns * options.turn_tokens) + 128
    settings: dict[str, Any] = {"page_size": 32, "max_context": longest} | parse_settings(options.set)
    num_pages = options.users * options.turns * options.turn_tokens // settings["page_size"] // 2
    if options.prefix:
        num_decode_pages = options.decodes * (-(-(options.decode_tokens + 64) // settings["page_size"]) + 1)
        num_pages = 5 * -(-options.prefix // settings["page_size"]) // 2 + num_decode_pages
    chosen = {
        "model": options.model,
        "random_weights": options.random_weights,
        "host_cache_gib": options.host_cache_gib,
        "num_pages": num_pages,
    }
    chosen |= settings
    if options.python_vllm:
        num_tokens = chosen["num_pages"] * chosen["page_size"]
        for side in options.sides:
            print(_measure_vllm(options, num_tokens, side == "with"), flush=True)
    if options.only_vllm:
        return
    server = EngineClock(ServeConfig(**chosen))
    if options.prefix:
        num_held = chosen["num_pages"] * chosen["page_size"] // options.prefix
        measure_prefix(server, num_held + 2, options.prefix, options.decodes, options.decode_tokens)
    if options.users:
        sizes = options.users, options.turns, options.turn_tokens, options.at_a_time
        measure_conversations(server, *sizes, sides=options.sides)
    server.engine.stop()


def _measure_vllm(options: argparse.Namespace, num_tokens: int, is_offloaded: bool) -> str:
    """Serves the conversations with vLLM, whose device holds `num_tokens`. Returns a line of figures, or why none."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": num_tokens // _VLLM_BLOCK_TOKENS}
    if is_offloaded:
        settings |= {"kv_offloading_size": options.host_cache_gib, "kv_offloading_backend": "native"}
    settings |= json.loads(options.set_vllm)
    sizes = {"users": options.users, "turns": options.turns, "turn-tokens": options.turn_tokens,
             "at-a-time": options.at_a_time}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="meshserve-vllm-") as folder, PowerWatch(is_gpu_expected=True) as watch:
        (Path(folder) / "config.json").write_text(json.dumps(model_config_json(options.model)))
        report = Path(folder) / "report.json"
        given = {"model-dir": folder, "settings": json.dumps(settings), "report": report} | sizes
        arguments = [f"--{name}={value}" for name, value in given.items()]
        peak = run_module("vllm_conversations", options.python_vllm, arguments, report, options.timeout)
        if isinstance(peak, str):
            return f"vLLM {'with' if is_offloaded else 'without'} offloading: {peak}"
        found = json.loads(report.read_text())
        power = at_power(watch.between(*found["span"]))
    return (
        f"{found['engine']} {'with' if is_offloaded else 'without'} offloading, {found['device_tokens']} tokens on the "
        f"device: {options.users} users, {options.turns} turns of {options.turn_tokens} tokens, {options.at_a_time} at "
        f"a time: {found['seconds']:.2f} s; first token of each turn "
        f"{' '.join(map(str, found['first_token_ms_by_turn']))} ms; {found['num_cached_tokens']} prompt tokens cached; "
        f"ready after {found['start_seconds']:.0f} s{power}"
    )


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
