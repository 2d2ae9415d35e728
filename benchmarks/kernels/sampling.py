"""The choice of the next token on the device, by sampling path.

The paths of a step's own sampler (`runtime/program/sampling.py`) are timed several times in one program, because inside
a step they need no launch of their own. Logits processors (`runtime/program/processors`) are launched after the step
and are timed that way; their paths begin with "penalties". "cuda" finds the thresholds of filters by our kernel, "xla"
by XLA's operations. Bytes are those of the logits.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels.implementation import Cost
from meshserve.kernels.sampling import implementation
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.program.processors.contract import ProcessorState
from meshserve.runtime.program.processors.logits_processors import sample_processed
from meshserve.runtime.program.processors.processor_batch import ADJUSTS, SAMPLES, ProcessorShape
from meshserve.runtime.program.sampling import SamplingBatch, sample
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.layout import round_up
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh, named_sharding

from .call import Call, matching

IMPLEMENTATIONS = ("cuda", "xla")
_PROGRAM_BYTES = 1 << 30  # maximum size of the logits that one program samples from
_MAX_COPIES = 8
_VOCAB = PartitionSpec(None, TENSOR_AXIS)
_ANY = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A sampling path of `tokens` requests."""

    path: str
    mode: SamplingMode
    filters: dict[str, float] = dataclasses.field(default_factory=dict)
    is_processed: bool = False
    has_logprobs: bool = False
    tokens: int = 1
    vocab: int = 0
    tp: int = 1

    @property
    def name(self) -> str:
        return f"{self.path} {self.tokens}"


_TOP_P, _FILTERS = {"top_p": 0.95}, {"top_p": 0.95, "top_k": 20, "min_p": 0.02}
PATHS = (
    Case(path="greedy", mode=SamplingMode.GREEDY),
    Case(path="temperature", mode=SamplingMode.RANDOM),
    Case(path="top-p", mode=SamplingMode.TOP_P, filters=_TOP_P),
    Case(path="min-p, top-k, top-p", mode=SamplingMode.FILTERED, filters=_FILTERS),
    Case(path="penalties, greedy", mode=SamplingMode.GREEDY, is_processed=True),
    Case(path="penalties, temperature", mode=SamplingMode.RANDOM, is_processed=True),
    Case(path="penalties, top-p", mode=SamplingMode.TOP_P, filters=_TOP_P, is_processed=True),
    Case(path="penalties, all filters", mode=SamplingMode.FILTERED, filters=_FILTERS, is_processed=True),
    Case(path="penalties, 20 log-probabilities", mode=SamplingMode.GREEDY, is_processed=True, has_logprobs=True),
)


def add_options(group: Any) -> None:
    group.add_argument("--vocab", type=int, default=151_936)


def cases(options: argparse.Namespace) -> list[Case]:
    sized = {"vocab": options.vocab, "tp": options.tp}
    found = [dataclasses.replace(path, tokens=tokens, **sized) for tokens in options.tokens for path in PATHS]
    return matching(found, options.case) if options.case else found


def call(options: argparse.Namespace, case: Case, name: str) -> Call:
    mesh = make_mesh(case.tp)
    vocab_size = round_up(case.vocab, mesh.size)
    device = mesh.devices.flat[0]
    find_threshold = implementation(device, vocab_size) if mesh.size == 1 else None
    if name == "cuda" and find_threshold is None:
        raise ValueError("there is no kernel for this device, mesh or vocabulary")
    choose = partial(
        sample,
        vocab_size=case.vocab,
        is_unrolled=device.platform == "gpu",
        find_threshold=find_threshold if name == "cuda" else None,
    )
    run, state, num_calls = (_processor_program if case.is_processed else _step_program)(mesh, case, vocab_size, choose)
    return Call(
        run=run, state=state, num_calls=num_calls, cost=Cost(num_bytes=4 * case.tokens * vocab_size / mesh.size)
    )


def _random_logits(mesh: Mesh, batch: int, vocab_size: int, seed: int) -> jax.Array:
    def draw() -> jax.Array:
        return 3.0 * jax.random.normal(jax.random.key(seed), (batch, vocab_size), jnp.float32)

    return jax.jit(draw, out_shardings=named_sharding(mesh, (None, "vocab")))()


def _step_program(
    mesh: Mesh, case: Case, vocab_size: int, choose: Callable[..., jax.Array]
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array, int]:
    """Returns a program that maps positions to the next ones, after sampling once from each of several logits."""
    batch, filters = case.tokens, case.filters
    num_copies = max(1, min(_MAX_COPIES, _PROGRAM_BYTES // (4 * batch * vocab_size)))
    logits = tuple(_random_logits(mesh, batch, vocab_size, seed) for seed in range(num_copies))

    def program(logits: Sequence[jax.Array], positions: jax.Array) -> jax.Array:
        for copy in logits:
            params = SamplingBatch(
                temperature=jnp.full(batch, 0.0 if case.mode is SamplingMode.GREEDY else 0.8, jnp.float32),
                top_p=jnp.full(batch, filters.get("top_p", 1.0), jnp.float32),
                top_k=jnp.full(batch, int(filters.get("top_k", 0)), jnp.int32),
                min_p=jnp.full(batch, filters.get("min_p", 0.0), jnp.float32),
                seed_low=jnp.arange(batch, dtype=jnp.uint32),
                seed_high=jnp.zeros(batch, jnp.uint32),
                position=positions,
            )
            positions = 1 + choose(copy, params, case.mode)
        return positions

    sharded = jax.shard_map(program, mesh=mesh, in_specs=(_VOCAB, _ANY), out_specs=_ANY, check_vma=False)
    compiled = jax.jit(sharded, compiler_options=compiler_options(mesh))
    return partial(compiled, logits), jnp.zeros(batch, jnp.int32), num_copies


def _processor_program(
    mesh: Mesh, case: Case, vocab_size: int, choose: Callable[..., jax.Array]
) -> tuple[Callable[[Any], Any], Any, int]:
    """Returns a program that maps (processor state, last tokens) to those after a step, and the first of them."""
    batch, vocab, every = case.tokens, named_sharding(mesh, (None, "vocab")), named_sharding(mesh, ())
    shape, state = ProcessorShape(batch), ProcessorState(_VOCAB, _VOCAB)

    def zeros() -> tuple[ProcessorState[jax.Array], jax.Array]:
        tables = ProcessorState(jnp.zeros((batch, vocab_size), jnp.int32), jnp.zeros((batch, vocab_size)))
        return tables, jnp.zeros(batch, jnp.int32)

    program = partial(sample_processed, shape=shape, vocab_size=case.vocab, choose=choose)
    specs, results = (state, _ANY, _VOCAB, _ANY, _ANY), (state, _ANY, _ANY)
    sharded = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=(0, 1), compiler_options=compiler_options(mesh))
    masks = jax.device_put(np.full((batch, -(-case.vocab // 32)), 2**32 - 1, np.uint32), every)
    packed = jax.device_put(_packed(case, shape), every)
    logits = _random_logits(mesh, batch, vocab_size, 0)

    def run(carry: Any) -> tuple[ProcessorState[jax.Array], jax.Array]:
        state, last_tokens, _ = compiled(*carry, logits, packed, masks)
        return state, last_tokens

    return run, jax.jit(zeros, out_shardings=(ProcessorState(vocab, vocab), every))(), 1


def _packed(case: Case, shape: ProcessorShape) -> np.ndarray:
    packed = np.zeros(shape.size, np.int32)
    floats = {
        "temperature": 0.0 if case.mode is SamplingMode.GREEDY else 0.8,
        "top_p": case.filters.get("top_p", 1.0),
        "min_p": case.filters.get("min_p", 0.0),
        "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1,
    }  # fmt: skip
    for name, value in floats.items():
        packed[shape.fields[name]] = np.float32(value).view(np.int32)
    packed[shape.fields["slots"]] = np.arange(shape.num_requests)
    packed[shape.fields["flags"]] = SAMPLES | ADJUSTS
    packed[shape.fields["top_k"]] = int(case.filters.get("top_k", 0))
    packed[shape.fields["mode"]] = case.mode
    packed[shape.fields["has_logprobs"]] = case.has_logprobs
    return packed
