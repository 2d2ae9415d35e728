"""Measures the output tokens per second of whole batches through the engine, without a server.

    meshserve bench throughput --model qwen3-0.6b --random-weights                       # nano-vllm's own workload
    meshserve bench throughput --model qwen3-8b --random-weights --workload fixed \\
        --requests 32 --input-tokens 1024 --output-tokens 256 --temperature 0

The first workload draws 256 requests with 100 to 1,024 tokens in and out (seed 0; 142,827 in, 133,966 out). A draw with
a different seed runs first, untimed. With `fixed`, the same batch with a single output token is timed as well, which is
its prefill. Any option of `meshserve serve` is set with --set KEY=VALUE.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading, at_power
from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.benchmarks.lib.offline_engine import OfflineEngine, config_for, parse_settings
from meshserve.benchmarks.lib.token_times import RunTimes, percentile
from meshserve.benchmarks.lib.workloads import MAX_TOKEN_ID, Work, fixed, nano_vllm
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.quantisation import NOT_QUANTIZED
from meshserve.runtime.startup.launch import open_model

_LENGTHS = (100, 1024)  # as in nano-vllm's benchmark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Medians over the runs; prefill and time per output token only if all requests are alike."""

    model: str
    workload: str
    tp: int
    device: str
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    seconds: float
    output_tokens_per_second: float
    first_token_ms: float
    gap_ms_p50: float
    gap_ms_p99: float
    prefill_seconds: float | None
    output_token_ms: float | None
    power: Reading | None  # of the GPU with the highest power, during the timed runs


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    settings = {"tp": options.tp, "cpu_devices": options.cpu_devices, **parse_settings(options.set)}
    quantize = str(settings.get("quantize", NOT_QUANTIZED))
    model, make_params = open_model(options.model, random_weights=options.random_weights, quantize=quantize)
    batches = [_draw(options, seed, model.vocab_size) for seed in range(options.runs + 1)]
    longest = max(len(work.prompt_token_ids) + work.max_tokens for batch in batches for work in batch)
    if longest > model.longest_context:
        raise ConfigError(
            f"requests of this workload have up to {longest} tokens, the model supports {model.longest_context}. "
            "Use --workload fixed with fewer --input-tokens and --output-tokens."
        )
    config = config_for(batches, {"model": options.model, **settings})
    is_fixed = options.workload == "fixed"
    with OfflineEngine(config, model, make_params) as engine, PowerWatch() as watch:
        engine.run(batches[-1], options.temperature)
        started = time.perf_counter()
        times = [engine.run(batch, options.temperature) for batch in batches[:-1]]
        power = watch.between(started, time.perf_counter())
        prefills = [
            engine.run([Work(work.prompt_token_ids, 1) for work in batch], options.temperature).seconds
            for batch in batches[: -1 if is_fixed else 0]
        ]
        if options.profile:
            with jax.profiler.trace(str(options.profile), create_perfetto_trace=False):
                engine.run(batches[0], options.temperature)
            print(kernel_table(options.profile))
    result = _result(options, batches[0], times, prefills, power)
    print(_text(result))
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(result), indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench throughput", description="Measure whole batches through the engine."
    )
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--workload", choices=("nano-vllm", "fixed"), default="nano-vllm")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--input-tokens", type=int, default=1024, help="input tokens of each request, with --workload fixed"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=256, help="output tokens of each request, with --workload fixed"
    )
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument(
        "--runs", type=int, default=1, help="number of timed runs, each with a new draw; the first has seed 0"
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument(
        "--profile", type=Path, help="trace the first batch once more into this folder, and print the kernels"
    )
    return parser


def _draw(options: argparse.Namespace, seed: int, vocab_size: int) -> list[Work]:
    max_id = min(MAX_TOKEN_ID, vocab_size - 1)
    if options.workload == "nano-vllm":
        return nano_vllm(seed, options.requests, *_LENGTHS, max_id)
    return fixed(seed, options.requests, options.input_tokens, options.output_tokens, max_id)


def _result(
    options: argparse.Namespace,
    batch: list[Work],
    times: list[RunTimes],
    prefills: list[float],
    power: Reading | None,
) -> Throughput:
    def median(values: list[float]) -> float:
        return percentile(values, 50)

    seconds = median([run.seconds for run in times])
    prefill = median(prefills) if prefills else None
    num_steps = options.output_tokens
    gaps = [gap for run in times for gap in run.gap_seconds]
    return Throughput(
        model=options.model,
        workload=options.workload,
        tp=options.tp,
        device=jax.devices()[0].device_kind,
        num_requests=len(batch),
        num_input_tokens=sum(len(work.prompt_token_ids) for work in batch),
        num_output_tokens=sum(work.max_tokens for work in batch),
        seconds=seconds,
        output_tokens_per_second=median([run.tokens_per_second for run in times]),
        first_token_ms=1e3 * median([second for run in times for second in run.first_seconds]),
        gap_ms_p50=1e3 * percentile(gaps, 50),
        gap_ms_p99=1e3 * percentile(gaps, 99),
        prefill_seconds=prefill,
        output_token_ms=None if prefill is None else 1e3 * (seconds - prefill) / num_steps,
        power=power,
    )


def _text(result: Throughput) -> str:
    lines = [
        f"{result.model} tp {result.tp} on {result.device}: {result.num_requests} requests, "
        f"{result.num_input_tokens:,} tokens in, {result.num_output_tokens:,} out ({result.workload})",
        f"{result.seconds:.3f} s, {result.output_tokens_per_second:,.0f} output tokens/s; first token "
        f"{result.first_token_ms:.1f} ms (median); between tokens p50 {result.gap_ms_p50:.2f} ms, "
        f"p99 {result.gap_ms_p99:.2f} ms{at_power(result.power)}",
    ]
    if result.prefill_seconds is not None:
        lines.append(
            f"prefill {result.prefill_seconds:.3f} s; {result.output_token_ms:.3f} ms per output token after it"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
