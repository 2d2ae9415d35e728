"""Times decoding through the real engine: scheduler, page tables and sampling on the device, planned one step ahead.

    meshserve bench decode --model qwen3-8b --random-weights --batch 1 32 128 --context 1024
    meshserve bench decode --model qwen3-8b --random-weights --quantize fp8-block --batch 1 32
    meshserve bench decode --model qwen3-30b-a3b --random-weights --tp 2 --set expert_parallel=true
    meshserve bench decode --model qwen3-30b-a3b --random-weights --batch 1 32 --balance --skew 0.2
    meshserve bench decode --model qwen3-8b --random-weights --batch 1 32 --adapters 8 --set max_adapter_rank=16

For each batch size and context length, requests of random tokens are prefilled and then decode together. A run is a
sequence of steps. After as many warm-up runs as measured runs, the table gives the median, P10 and P90 of the step time
over the runs. The context length is the average in the middle of the measurement. With `--first-context`, one request
of each batch has a different length, for example a long one among short ones. The roofline is the minimum time in which
the device can read what a step must read: every weight once (of the embedding, only the rows looked up), and all keys
and values.

The line ends with the GPU's clock and power during the measurement, if NVIDIA's library is available.

With `--balance`, a line for each batch size tells how evenly its tokens choose the experts of a model that has some.
Random weights choose about uniformly; `--skew` makes some experts busier.

With `--adapters`, the requests have that many random adapters (LoRA) on all projections in turn, each with as many
requests as the others. The roofline does not count what is read for them. For a server with room for adapters and
requests without any, set `max_adapters` alone.

A step is *starved* if the device had already finished the previous step when this one was dispatched, which means that
the host was too slow. The dispatch time is the host's time in the call that launches a step.
"""

import argparse
import dataclasses
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshserve.benchmarks.lib.expert_balance import balance_text, expert_tokens, with_skewed_router
from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading, at_power
from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.random_adapters import RandomCatalog
from meshserve.runtime.adapters.changes import AdapterChanges
from meshserve.runtime.api.request import Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.engine import Engine
from meshserve.runtime.engine.runner import Runner
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.model_files.quantization import NOT_QUANTIZED, SCHEMES
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.roofline import Roofline
from meshserve.runtime.program.batch import Bucket
from meshserve.runtime.program.processors.processor_batch import Logprobs, Sampled
from meshserve.runtime.resolve.resolved_server import ResolvedServer
from meshserve.runtime.startup.launch import build_engine, open_model
from meshserve.sharding.chips import chip_of

_PREFILL_STEPS = 4  # slack before the first measured step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table, with times in milliseconds."""

    model: str
    tp: int
    batch: int
    context: int
    first_context: int  # the first request's; the others have `context`
    step_ms: float
    step_ms_p10: float
    step_ms_p90: float
    tokens_per_second: float
    roofline_ms: float | None
    roofline_fraction: float | None
    starved_steps: float
    dispatch_ms: float
    prefill_seconds: float
    power: Reading | None  # for the GPU with the highest power, during the measured steps


class Timeline:
    """Collects the time of each step's outputs; `deliver` is the engine's output callback."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        self.steps: list[tuple[float, int]] = []  # (time, number of tokens)
        self.num_finished = 0

    def deliver(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        with self._changed:
            self.steps.append((now, sum(len(output.token_ids) for output in outputs)))
            self.num_finished += sum(output.finish_reason is not None for output in outputs)
            self._changed.notify()

    def full(self, batch: int) -> list[float]:
        """Returns the times of the steps so far that gave a token to each of `batch` requests."""
        return [moment for moment, num_tokens in self.steps if num_tokens == batch]

    def wait(self, engine: Engine, num_requests: int) -> None:
        with self._changed:
            while self.num_finished < num_requests:
                self._changed.wait(timeout=1.0)
                if engine.failure is not None:
                    raise RuntimeError(f"the engine failed: {engine.failure}")


class WatchedRunner:
    """A runner that times the dispatches and counts steps dispatched after the device had run out of work."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._last: Any = None
        self.starved: list[bool] = []
        self.dispatch_ms: list[float] = []

    def set_page_row(self, page_row: np.ndarray) -> None:
        self._runner.set_page_row(page_row)

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        self.starved.append(self._last is None or self._last.is_ready())
        started = time.perf_counter()
        self._last = self._runner.run(bucket, packed)
        self.dispatch_ms.append(1000 * (time.perf_counter() - started))
        return self._last

    def set_slot_adjustments(self, row: int, history: np.ndarray, bias: np.ndarray) -> None:
        self._runner.set_slot_adjustments(row, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[Any]:
        return self._runner.sample(packed, masks)

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[Any]:
        return self._runner.prompt_logprobs(targets)

    def change_adapters(self, changes: AdapterChanges) -> None:
        self._runner.change_adapters(changes)

    def copy_pages(self, command: np.ndarray) -> None:
        self._runner.copy_pages(command)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    model, make_params = open_model(
        options.model,
        random_weights=options.random_weights,
        quantize=options.quantize,
        fp8_head=options.fp8_head,
    )
    if (options.skew or options.balance) and model.experts is None:
        raise SystemExit(f"{options.model} has no experts; --skew and --balance are for mixtures of experts.")
    num_steps = 2 * options.runs * options.steps  # warm-up and measurement
    config = _serve_config(options, num_steps)
    timeline = Timeline()
    made: list[tuple[nnx.GraphDef, nnx.State]] = []

    def make(*target: Any) -> tuple[nnx.GraphDef, nnx.State]:
        structure, params = make_params(*target)
        made.append((structure, with_skewed_router(params, options.skew) if options.skew else params))
        return made[0]

    engine, server = build_engine(config, model, make, None, timeline.deliver)
    if options.adapters:
        engine.adapters = RandomCatalog.of(server, options.adapters)
    engine.runner = watched = WatchedRunner(engine.runner)
    engine.start()
    results = []
    with PowerWatch() as power:
        for context in options.context:
            for batch in options.batch:
                results.append(_measure(options, server, engine, timeline, watched, power, batch, context))
                print(_row(results[-1]), flush=True)
    if options.balance:
        assert server.layout.experts is not None
        num_devices = options.tp if server.layout.experts.is_by_expert else 1
        for batch in options.batch:
            print(f"batch {batch:4d} {balance_text(expert_tokens(server, *made[0], batch), num_devices)}")
    for context in options.context if options.profile else ():
        for batch in options.batch:
            print(f"batch {batch}, context {context}:\n{_profile(options, model, engine, timeline, batch, context)}")
    engine.stop()
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshserve bench decode", description="Time decoding through the engine.")
    parser.add_argument("--model", required=True, help="a model directory, or a published size with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="generate random weights on the device")
    parser.add_argument(
        "--quantize",
        choices=(NOT_QUANTIZED, *SCHEMES),
        default=NOT_QUANTIZED,
        help="quantize the weights, or generate random ones in this format",
    )
    parser.add_argument("--fp8-head", action="store_true", help="quantize the output head to FP8")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--balance", action="store_true", help="print how evenly tokens choose the model's experts")
    parser.add_argument(
        "--skew",
        type=float,
        default=0.0,
        help="multiply the router's row of expert e by (e + 1) ** -SKEW; the first experts are then chosen more often",
    )
    parser.add_argument("--adapters", type=int, default=0, help="give requests this many adapters (LoRA) in turn")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument(
        "--first-context", type=int, help="context length of one request of each batch, instead of --context"
    )
    parser.add_argument(
        "--max-context", type=int, default=0, help="maximum context of the server, if more than the steps need"
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="decode steps per run")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-step-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--decode-layers", default="auto")
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument(
        "--profile", type=Path, help="trace more steps of each case into this folder, and print the kernels"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def _serve_config(options: argparse.Namespace, num_steps: int) -> ServeConfig:
    """Returns a configuration with just enough pages for the largest case."""
    contexts = _contexts(options, max(options.batch), max(options.context))
    num_new = num_steps + _num_prefill_steps(options, contexts)
    num_pages = sum(-(-(context + num_new) // options.page_size) for context in contexts)
    settings: dict[str, Any] = dict(
        tp=options.tp,
        cpu_devices=options.cpu_devices,
        dtype=options.dtype,
        page_size=options.page_size,
        num_pages=num_pages,
        max_context=max(options.max_context, max(contexts) + num_new),
        max_running=max(options.batch),
        max_step_tokens=max(options.max_step_tokens, *options.batch),
        max_decode_steps=1,  # each step has a time of its own
        attention=options.attention,
        decode_layers=options.decode_layers,
        prefix_cache=False,  # the cases use the same prompts, and each must be prefilled
        logits_processors=False,
    )
    if options.adapters:
        settings["max_adapters"] = options.adapters
    return ServeConfig(model=options.model, **{**settings, **parse_settings(options.set)})


def _contexts(options: argparse.Namespace, batch: int, context: int) -> list[int]:
    return [options.first_context or context] + [context] * (batch - 1)


def _num_prefill_steps(options: argparse.Namespace, contexts: Sequence[int]) -> int:
    return -(-sum(contexts) // options.max_step_tokens) + _PREFILL_STEPS


def _measure(
    options: argparse.Namespace,
    server: ResolvedServer,
    engine: Engine,
    timeline: Timeline,
    watched: WatchedRunner,
    power: PowerWatch,
    batch: int,
    context: int,
) -> Result:
    timeline.reset()
    contexts = _contexts(options, batch, context)
    started = time.perf_counter()
    _submit(options, server.model, engine, contexts)
    timeline.wait(engine, batch)
    times = timeline.full(batch)
    if len(times) < options.runs * options.steps + 2:
        raise ValueError(f"batch {batch} did not decode together for long enough. Raise --runs, --steps or --context.")
    first_full = times[0]
    times = times[-(options.runs * options.steps + 1) - 1 : -1]
    runs = [
        1000 * (times[start + options.steps] - times[start]) / options.steps
        for start in range(0, len(times) - options.steps, options.steps)
    ]
    step_ms = statistics.median(runs)
    roofline_ms = _roofline_ms(server, contexts)
    return Result(
        model=options.model,
        tp=options.tp,
        batch=batch,
        context=context,
        first_context=contexts[0],
        step_ms=step_ms,
        step_ms_p10=float(np.percentile(runs, 10)),
        step_ms_p90=float(np.percentile(runs, 90)),
        tokens_per_second=batch / step_ms * 1000,
        roofline_ms=roofline_ms,
        roofline_fraction=roofline_ms / step_ms if roofline_ms else None,
        starved_steps=float(np.mean(watched.starved[-len(times) :])),
        dispatch_ms=statistics.median(watched.dispatch_ms[-len(times) :]),
        prefill_seconds=first_full - started,
        power=power.between(times[0], times[-1]),
    )


def _submit(options: argparse.Namespace, model: ModelConfig, engine: Engine, contexts: Sequence[int]) -> None:
    """Submits requests that all decode together for the duration of a warm-up and a measurement."""
    num_steps = 2 * options.runs * options.steps
    draw = random.Random(len(contexts) * 1_000_003 + contexts[-1])  # different prompts in each case
    # Requests that are prefilled early decode while the others are still prefilled; all must outlast the measurement.
    num_prefill_steps = _num_prefill_steps(options, contexts)
    for index, context in enumerate(contexts):
        num_prompt_tokens = max(1, context - 3 * num_steps // 4 - num_prefill_steps // 2)
        prompt = tuple(draw.randrange(min(model.vocab_size, 10_000)) for _ in range(num_prompt_tokens))
        params = SamplingParams(
            max_tokens=num_steps + num_prefill_steps,
            temperature=options.temperature,
            ignore_eos=True,
        )
        adapter = str(index % options.adapters) if options.adapters else ""
        engine.submit(str(index), prompt, params, RequestOptions(adapter=adapter))


def _profile(
    options: argparse.Namespace, model: ModelConfig, engine: Engine, timeline: Timeline, batch: int, context: int
) -> str:
    """Returns a table of the kernels of a case's decode steps in which all its requests run."""
    contexts, folder = _contexts(options, batch, context), options.profile / f"{batch}-{context}"
    timeline.reset()
    # The profiler must start before the steps, because it does not work with command buffers that are in flight.
    with jax.profiler.trace(str(folder), create_perfetto_trace=False):
        _submit(options, model, engine, contexts)
        timeline.wait(engine, len(contexts))
    times, ended = timeline.full(len(contexts)), timeline.steps[-1][0]
    return kernel_table(folder, num_steps=len(times) - 1, window=(ended - times[0], ended - times[-1]))


def _roofline_ms(server: ResolvedServer, contexts: Sequence[int]) -> float | None:
    """Returns the time in which a device can read what a step must read, or None if its bandwidth is unknown."""
    chip = chip_of(jax.devices()[0])
    if chip is None:
        return None
    roofline = Roofline(shapes=server.kernel_shapes, chip=chip)
    num_bytes = roofline.read_weight_bytes(len(contexts)) + sum(contexts) * roofline.token_bytes
    return 1000 * num_bytes / chip.hbm_bytes_per_second


def _row(result: Result) -> str:
    fraction = f"{result.roofline_fraction:5.1%} of the roofline" if result.roofline_fraction else "roofline unknown"
    first = "" if result.first_context == result.context else f" (one {result.first_context})"
    return (
        f"{result.model} tp {result.tp} batch {result.batch:4d} context {result.context:6d}{first}: "
        f"{result.step_ms:7.3f} ms a step (P10 {result.step_ms_p10:.3f}, P90 {result.step_ms_p90:.3f}), "
        f"{result.tokens_per_second:8.0f} tokens/s, {fraction}, {result.starved_steps:.0%} of steps starved, "
        f"dispatch {result.dispatch_ms:.3f} ms, prefill {result.prefill_seconds:.2f} s{at_power(result.power)}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
