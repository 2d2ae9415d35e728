"""Times prefill through the real engine, from submitting the prompts to the first token of the last prompt.

    meshserve bench prefill --model qwen3-8b --random-weights --prompts 1x1024 1x4096 8x4096

A workload NxT is N prompts of T random tokens, submitted together to an idle engine; each requests one output token.
After as many warm-up runs as measured runs, the table gives the median, P10 and P90. For one prompt, the time is its
time to first token. TFLOP/s is per device and counts only the work of the linear layers (two operations per token and
parameter of the layers), so the cost of attention, norms, padding and all-reduces lowers it. It counts the last layer's
MLP for every token, although a step skips tokens whose logits are not needed: 2.2 % of an 8B's work.
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading, at_power
from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.model_files.quantization import NOT_QUANTIZED, SCHEMES
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.launch import build_engine, open_model

from .decode import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table, with times in milliseconds."""

    model: str
    tp: int
    prompts: int
    tokens: int  # in each prompt
    ms: float
    ms_p10: float
    ms_p90: float
    tokens_per_second: float
    linear_tflops: float  # per device
    power: Reading | None  # for the GPU with the highest power, during the measured runs


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, make_params = open_model(options.model, random_weights=options.random_weights, quantize=options.quantize)
    timeline = Timeline()
    engine, _ = build_engine(_serve_config(options), model, make_params, None, timeline.deliver)
    engine.start()
    results = []
    with PowerWatch() as power:
        for num_prompts, num_tokens in options.prompts:
            results.append(_measure(options, model, engine, timeline, power, num_prompts, num_tokens))
            print(_row(results[-1]), flush=True)
    if options.profile:
        with jax.profiler.trace(str(options.profile), create_perfetto_trace=False):
            _run(model, engine, timeline, *options.prompts[-1], seed=-1)
        print(kernel_table(options.profile))
    engine.stop()
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 0


def _workload(text: str) -> tuple[int, int]:
    num_prompts, _, num_tokens = text.partition("x")
    return int(num_prompts), int(num_tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshserve bench prefill", description="Time prefill through the engine.")
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument("--prompts", type=_workload, nargs="+", default=[(1, 1024), (8, 4096)], metavar="NxT")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-step-tokens", type=int, default=4096)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--quantize", default=NOT_QUANTIZED, choices=(NOT_QUANTIZED, *SCHEMES))
    parser.add_argument("--linear", default="auto", help="as for meshserve serve: auto, xla, xla_fp8 or cuda_fp8")
    parser.add_argument("--gemm-backend", default="auto", help="as for meshserve serve: auto, tuned or library")
    parser.add_argument("--all-reduce", default="auto", help="as for meshserve serve: auto, xla or p2p")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument(
        "--profile", type=Path, help="trace one more run of the last workload into this folder, and print its kernels"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def _serve_config(options: argparse.Namespace) -> ServeConfig:
    """Returns a configuration with just enough pages for the largest workload."""
    most_prompts = max(num_prompts for num_prompts, _ in options.prompts)
    max_context = max(num_tokens for _, num_tokens in options.prompts) + 2
    return ServeConfig(
        model=options.model,
        tp=options.tp,
        cpu_devices=options.cpu_devices,
        dtype=options.dtype,
        page_size=options.page_size,
        num_pages=most_prompts * -(-max_context // options.page_size),
        max_context=max_context,
        max_running=min(most_prompts, options.max_step_tokens),
        max_step_tokens=options.max_step_tokens,
        attention=options.attention,
        quantize=options.quantize,
        linear=options.linear,
        gemm_backend=options.gemm_backend,
        all_reduce=options.all_reduce,
        prefix_cache=False,
        logits_processors=False,
    )


def _run(
    model: ModelConfig, engine: Engine, timeline: Timeline, num_prompts: int, num_tokens: int, *, seed: int
) -> float:
    """Returns the milliseconds until every prompt has its first token."""
    draw = random.Random(seed)
    most = min(model.vocab_size, 10_000)
    prompts = [tuple(draw.randrange(most) for _ in range(num_tokens)) for _ in range(num_prompts)]
    timeline.reset()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(f"{seed}-{index}", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    timeline.wait(engine, num_prompts)
    return 1000 * (timeline.steps[-1][0] - started)


def _measure(
    options: argparse.Namespace,
    model: ModelConfig,
    engine: Engine,
    timeline: Timeline,
    power: PowerWatch,
    prompts: int,
    tokens: int,
) -> Result:
    for seed in range(options.runs):
        _run(model, engine, timeline, prompts, tokens, seed=seed)
    started = time.perf_counter()
    figures = [_run(model, engine, timeline, prompts, tokens, seed=options.runs + seed) for seed in range(options.runs)]
    ms, p10, p90 = (float(np.percentile(figures, rank)) for rank in (50, 10, 90))
    num_computed = prompts * tokens
    return Result(
        model=options.model,
        tp=options.tp,
        prompts=prompts,
        tokens=tokens,
        ms=ms,
        ms_p10=p10,
        ms_p90=p90,
        tokens_per_second=num_computed / ms * 1e3,
        linear_tflops=num_computed * linear_flops(model) / options.tp / ms / 1e9,
        power=power.between(started, time.perf_counter()),
    )


def linear_flops(model: ModelConfig) -> int:
    """Returns the operations per token: two for each parameter of the layers' projections that it passes through."""
    attention = model.num_layers * (2 * model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
    mlps = model.num_layers * 3 * model.mlp_dim
    if model.experts is not None:
        mlps = len(model.stacks["layers"]) * 3 * model.experts.num_chosen * model.experts.mlp_dim
        mlps += len(model.stacks.get("dense_layers", ())) * 3 * model.mlp_dim
    return 2 * model.embed_dim * (attention + mlps)


def _row(result: Result) -> str:
    return (
        f"{result.model} tp {result.tp} {result.prompts:3d} x {result.tokens:6d} tokens: {result.ms:8.2f} ms "
        f"(P10 {result.ms_p10:.2f}, P90 {result.ms_p90:.2f}), {result.tokens_per_second:8.0f} tokens/s, "
        f"{result.linear_tflops:6.1f} TFLOP/s of linear work per device{at_power(result.power)}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
