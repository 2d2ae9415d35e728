"""Times the choice of the next token on the device, per sampling path, also as a share of a Qwen3-8B decode step.

    meshserve bench sampling [--batch 1 64 256] [--vocab 151936] [--tp 1] [--step-ms 4.2 6.9 12.5] [--json FILE]

The paths of a step's own sampler (`runtime/program/sampling.py`) are timed several times in one program, because inside
a step they need no launch of their own. The logits processors (`runtime/program/logits_processors.py`) are launched
after the step and are timed that way. Without --step-ms the step time is the minimum that the device allows: its
weights and 1,024 tokens of context per request, read once. Shares of a real step are smaller.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshserve.benchmarks.lib.timing import timed_ms
from meshserve.kernels.sampling import implementation
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.processors.contract import ProcessorState
from meshserve.runtime.program.logits_processors import sample_processed
from meshserve.runtime.program.processor_batch import ADJUSTS, SAMPLES, ProcessorShape
from meshserve.runtime.program.sampling import SamplingBatch, sample
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.layout import round_up
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh, named_sharding

_MODEL = "qwen3-8b"
_CONTEXT_TOKENS = 1_024
_BANDWIDTH_BYTES = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second, from the data sheets
_PROGRAM_BYTES = 1 << 30  # maximum size of the logits that one program samples from
_MAX_COPIES = 8
_VOCAB = PartitionSpec(None, TENSOR_AXIS)
_ANY = PartitionSpec()

# Path -> mode, and the parameters of every request.
STEP_PATHS: dict[str, tuple[SamplingMode, dict[str, float]]] = {
    "greedy": (SamplingMode.GREEDY, {"temperature": 0.0}),
    "temperature": (SamplingMode.RANDOM, {}),
    "top-p": (SamplingMode.TOP_P, {"top_p": 0.95}),
    "min-p, top-k, top-p": (SamplingMode.FILTERED, {"top_p": 0.95, "top_k": 20, "min_p": 0.02}),
}
# Path -> mode, and whether log-probabilities are requested.
PROCESSOR_PATHS: dict[str, tuple[SamplingMode, bool]] = {
    "penalties, greedy": (SamplingMode.GREEDY, False),
    "penalties, temperature": (SamplingMode.RANDOM, False),
    "penalties, top-p": (SamplingMode.TOP_P, False),
    "penalties, all filters": (SamplingMode.FILTERED, False),
    "penalties, greedy, 20 log-probabilities": (SamplingMode.GREEDY, True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table, with times in milliseconds."""

    path: str
    batch: int
    ms: float
    ms_p90: float
    step_ms: float | None
    share: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="meshserve bench sampling", description="Time sampling on the device.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="requests per step")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--step-ms", type=float, nargs="+", help="measured decode step times, one per batch size")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="total time of the timed calls of a path")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    if options.step_ms is not None and len(options.step_ms) != len(options.batch):
        parser.error(f"got {len(options.step_ms)} --step-ms for {len(options.batch)} --batch; give one for each")
    mesh, results = make_mesh(options.tp), []
    print(f"{options.tp} x {jax.devices()[0].device_kind}, vocabulary {options.vocab}", flush=True)
    for index, batch in enumerate(options.batch):
        step_ms = options.step_ms[index] if options.step_ms else _least_step_ms(batch, options.tp)
        for path, figures in _measured(mesh, batch, options):
            ms = float(np.median(figures))
            share = ms / step_ms if step_ms else None
            result = Result(
                path=path, batch=batch, ms=ms, ms_p90=float(np.percentile(figures, 90)), step_ms=step_ms, share=share
            )
            results.append(result)
            part = f"{share:6.1%} of a step of {step_ms:.2f} ms" if step_ms else "step unknown"
            print(
                f"batch {batch:4d}  {path:40s} {ms * 1000:8.1f} us (P90 {result.ms_p90 * 1000:.1f})  {part}", flush=True
            )
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 0


def _least_step_ms(batch: int, tp: int) -> float | None:
    """Returns the minimum time of a decode step, or None for a device with unknown bandwidth."""
    kind = jax.devices()[0].device_kind
    bandwidth = next((rate for name, rate in _BANDWIDTH_BYTES.items() if name in kind), None)
    if bandwidth is None:
        return None
    model = named_model(_MODEL)
    num_cached = batch * _CONTEXT_TOKENS * model.num_layers * 2 * max(model.num_kv_heads, tp) * model.head_dim
    num_read = model.num_params - model.vocab_size * model.embed_dim + num_cached
    return 1000 * np.dtype("uint16").itemsize * num_read / tp / bandwidth


def _measured(mesh: Mesh, batch: int, options: argparse.Namespace) -> Iterator[tuple[str, list[float]]]:
    time = partial(timed_ms, rounds=options.rounds, seconds=options.seconds)
    vocab_size = round_up(options.vocab, mesh.size)
    num_copies = max(1, min(_MAX_COPIES, _PROGRAM_BYTES // (4 * batch * vocab_size)))
    logits = [_random_logits(mesh, batch, vocab_size, seed) for seed in range(num_copies)]
    for path, (mode, fields) in STEP_PATHS.items():
        run = _step_program(mesh, logits, options.vocab, mode, fields)
        yield path, time(run, jnp.zeros(batch, jnp.int32), num_copies)[0]
    state = _processor_state(mesh, batch, vocab_size)
    control = _processor_program(mesh, logits[0], options.vocab)
    for path, (mode, has_logprobs) in PROCESSOR_PATHS.items():
        packed = jax.device_put(_packed(ProcessorShape(batch), mode, has_logprobs), named_sharding(mesh, ()))
        figures, state = time(partial(control, packed), state, 1)
        yield path, figures


def _sampler(mesh: Mesh, vocab_size: int) -> Callable[..., jax.Array]:
    """Returns `sample` as a server on these devices would configure it."""
    device = mesh.devices.flat[0]
    return partial(
        sample,
        vocab_size=vocab_size,
        is_unrolled=device.platform == "gpu",
        find_threshold=implementation(device, vocab_size),
    )


def _random_logits(mesh: Mesh, batch: int, vocab_size: int, seed: int) -> jax.Array:
    def draw() -> jax.Array:
        return 3.0 * jax.random.normal(jax.random.key(seed), (batch, vocab_size), jnp.float32)

    return jax.jit(draw, out_shardings=named_sharding(mesh, (None, "vocab")))()


def _step_program(
    mesh: Mesh, logits: Sequence[jax.Array], vocab_size: int, mode: SamplingMode, fields: dict[str, float]
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that maps positions to the next ones, after sampling once from each of `logits`."""
    batch, choose = logits[0].shape[0], _sampler(mesh, vocab_size)

    def program(logits: Sequence[jax.Array], positions: jax.Array) -> jax.Array:
        for copy in logits:
            params = SamplingBatch(
                temperature=jnp.full(batch, fields.get("temperature", 0.8), jnp.float32),
                top_p=jnp.full(batch, fields.get("top_p", 1.0), jnp.float32),
                top_k=jnp.full(batch, int(fields.get("top_k", 0)), jnp.int32),
                min_p=jnp.full(batch, fields.get("min_p", 0.0), jnp.float32),
                seed_low=jnp.arange(batch, dtype=jnp.uint32),
                seed_high=jnp.zeros(batch, jnp.uint32),
                position=positions,
            )
            positions = 1 + choose(copy, params, mode)
        return positions

    sharded = jax.shard_map(program, mesh=mesh, in_specs=(_VOCAB, _ANY), out_specs=_ANY, check_vma=False)
    compiled = jax.jit(sharded, compiler_options=compiler_options(mesh))
    return partial(compiled, tuple(logits))


def _processor_state(mesh: Mesh, batch: int, vocab_size: int) -> tuple[ProcessorState[jax.Array], jax.Array]:
    vocab, every = named_sharding(mesh, (None, "vocab")), named_sharding(mesh, ())

    def zeros() -> tuple[ProcessorState[jax.Array], jax.Array]:
        shape = (batch, vocab_size)
        return ProcessorState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape)), jnp.zeros(batch, jnp.int32)

    return jax.jit(zeros, out_shardings=(ProcessorState(vocab, vocab), every))()


def _processor_program(mesh: Mesh, logits: jax.Array, vocab_size: int) -> Callable[[jax.Array, Any], Any]:
    """Returns a function that maps a packed batch and the (processor state, last tokens) to those after a step."""
    shape = ProcessorShape(logits.shape[0])
    state = ProcessorState(_VOCAB, _VOCAB)
    program = partial(sample_processed, shape=shape, vocab_size=vocab_size, choose=_sampler(mesh, vocab_size))
    specs, results = (state, _ANY, _VOCAB, _ANY, _ANY), (state, _ANY, _ANY)
    sharded = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=(0, 1), compiler_options=compiler_options(mesh))
    masks = jax.device_put(
        np.full((shape.num_requests, -(-vocab_size // 32)), 2**32 - 1, np.uint32), named_sharding(mesh, ())
    )

    def run(packed: jax.Array, carry: Any) -> tuple[ProcessorState[jax.Array], jax.Array]:
        state, last_tokens, _ = compiled(*carry, logits, packed, masks)
        return state, last_tokens

    return run


def _packed(shape: ProcessorShape, mode: SamplingMode, has_logprobs: bool) -> np.ndarray:
    packed = np.zeros(shape.size, np.int32)
    is_filtered = mode is SamplingMode.FILTERED
    floats = {
        "temperature": 0.0 if mode is SamplingMode.GREEDY else 0.8,
        "top_p": 0.95 if mode in (SamplingMode.TOP_P, SamplingMode.FILTERED) else 1.0,
        "min_p": 0.02 if is_filtered else 0.0,
        "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1,
    }  # fmt: skip
    for name, value in floats.items():
        packed[shape.fields[name]] = np.float32(value).view(np.int32)
    packed[shape.fields["slots"]] = np.arange(shape.num_requests)
    packed[shape.fields["flags"]] = SAMPLES | ADJUSTS
    packed[shape.fields["top_k"]] = 20 if is_filtered else 0
    packed[shape.fields["mode"]] = mode
    packed[shape.fields["has_logprobs"]] = has_logprobs
    return packed


if __name__ == "__main__":
    raise SystemExit(main())
