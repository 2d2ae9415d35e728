"""All layers of a decode step in one call, or with `--projections` some of their products alone, as on a mesh.

Steps are written as for attention, with one new token for each request: 1x31/1024+1x1/32768. With `--tp` the shapes
are those of one shard, alone, without all-reduces. Of the experts, those are read that tokens are expected to choose.
`--tune` sets fields of `sm90_calls.LaunchShape`, such as qkv_splits=4.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.random_arrays import random_array, random_matrix
from meshserve.kernels import decode_layers
from meshserve.kernels.decode_layers import DecodeBatch, DecodeShapes, LayerSettings, LayerWeights, sm90_calls
from meshserve.kernels.decode_layers.cases import (
    CASES,
    EXPERT_CASES,
    FORMATS,
    SHARDS,
    Case,
    fp8_cache_cases,
    quantized_cases,
)
from meshserve.kernels.experts import ExpertStep
from meshserve.kernels.linear import Matrix
from meshserve.kernels.linear.contract import least_cost
from meshserve.kernels.paged_attention import AttentionStep

from .attention import paged_batch, requests_of
from .call import Call, matching, sizes

IMPLEMENTATIONS = tuple(decode_layers.IMPLEMENTATIONS)
PROJECTIONS = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersCase(Case):
    """Layers, or one projection of them."""

    projection: str = ""


def add_options(group: Any) -> None:
    pass


def cases(options: argparse.Namespace) -> list[LayersCase]:
    if options.case:
        named = matching((*CASES, *SHARDS, *EXPERT_CASES, *quantized_cases(), *fp8_cache_cases()), options.case)
    else:
        named = [_case_of_model(options, step) for step in options.steps]
    return [
        LayersCase(**{**vars(case), "name": f"{case.name} {projection}".strip()}, projection=projection)
        for case in named
        for projection in options.projections or [""]
    ]


def _case_of_model(options: argparse.Namespace, step: str) -> Case:
    model, layout = sizes(options)
    requests = requests_of(step)
    if any(new != 1 for new, _ in requests):
        raise SystemExit(f"--steps {step}: a decode step has one new token for each request, such as 1x32/1024.")
    experts = layout.experts
    return Case(
        name=f"{options.model} tp {options.tp} {step}"
        + ("" if options.weights == "bfloat16" else f" {options.weights}"),
        lengths=tuple(total for _, total in requests),
        num_layers=options.layers or model.num_layers,
        embed=model.embed_dim,
        kv_heads=layout.num_groups // options.tp,
        group=layout.group_size,
        head_dim=model.head_dim,
        mlp=layout.mlp_dim // options.tp if experts is None else experts.block_mlp_dim,
        page_size=options.page_size,
        num_experts=0 if experts is None else experts.num_experts,
        num_chosen=0 if model.experts is None else model.experts.num_chosen,
        weights="" if options.weights == "bfloat16" else options.weights,
        cache_dtype=options.kv_dtype,
    )


def call(options: argparse.Namespace, case: LayersCase, name: str) -> Call:
    kernels = decode_layers.implementation(name)
    if name == "cuda":
        kernels = _with_launch(options.tune)
    weights = random_weights(case, options.dtype)
    settings = LayerSettings(
        epsilon=1e-6, softmax_scale=case.head_dim**-0.5, router=case.router, has_drafts=case.has_drafts
    )
    if case.projection:
        return _projection(case, kernels, weights, settings)
    return _layers(case, name, kernels, weights, settings)


def _with_launch(tune: dict[str, int]) -> Any:
    """Returns the CUDA kernels with a launch shape of their own."""

    class Tuned:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return partial(getattr(sm90_calls, name), launch=sm90_calls.LaunchShape(**tune))

    return Tuned() if tune else sm90_calls


def random_weights(case: Case, dtype: str) -> LayerWeights:
    n, form = case.num_layers, FORMATS.get(case.weights)
    experts = (case.num_experts,) if case.num_experts else ()

    def matrix(seed: int, *shape: int) -> Matrix:
        return random_matrix((n, *shape), seed, form, dtype)

    return LayerWeights(
        input_norm=jnp.ones((n, case.embed), dtype),
        qkv=matrix(1, case.kv_heads, (case.group + 2) * case.head_dim, case.embed),
        q_norm=jnp.ones((n, case.head_dim), dtype),
        k_norm=jnp.ones((n, case.head_dim), dtype),
        o=matrix(2, case.embed, case.kv_heads * case.group * case.head_dim),
        post_norm=jnp.ones((n, case.embed), dtype),
        gate_up=matrix(3, *experts, 2, case.mlp, case.embed),
        down=matrix(4, *experts, case.embed, case.mlp),
        router=random_array((n, *experts, case.embed), 9, dtype) if experts else None,
    )


def random_cache(case: Case, dtype: str, *, is_empty: bool = False) -> tuple[jax.Array, DecodeBatch]:
    """Returns the pages of the requests, and where they are; with `is_empty`, of requests of one token each."""
    lengths = [1 if is_empty else max(length, 1) for length in case.lengths]
    batch, num_pages = paged_batch([(1, length) for length in lengths], case.page_size)
    shape = (case.num_layers, num_pages, case.kv_heads, 2, case.page_size, case.head_dim)
    where = DecodeBatch(jnp.asarray(lengths, jnp.int32) - 1, batch.page_table)
    return random_array(shape, 5, case.cache_dtype or dtype), where


def _frequencies(case: Case) -> jax.Array:
    return jnp.asarray(1e6 ** (-np.arange(0, case.head_dim, 2) / case.head_dim), jnp.float32)


def _layers(case: LayersCase, name: str, kernels: Any, weights: LayerWeights, settings: LayerSettings) -> Call:
    dtype = weights.input_norm.dtype.name
    cache, where = random_cache(case, dtype)
    x = random_array((len(case.lengths), case.embed), 7, dtype)

    @partial(jax.jit, donate_argnums=1)
    def run(weights: LayerWeights, cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kernels.decode_layers(x, weights, cache, where, _frequencies(case), settings=settings)[:2]

    shapes = DecodeShapes(weights=weights, cache=cache, router=case.router)
    lengths = [length for length in case.lengths if length]
    step = AttentionStep(len(case.lengths), sum(lengths), sum(lengths), max(lengths, default=0))
    return Call(
        run=lambda state: run(weights, state[1], x),
        state=(x, cache),
        num_calls=1,
        cost=decode_layers.IMPLEMENTATIONS[name].cost(shapes, step, _expert_step(case)).times(case.num_layers),
        result=lambda: run(weights, jnp.copy(cache), x)[0],
    )


def _expert_step(case: Case) -> ExpertStep | None:
    """Returns what tokens ask of a layer's experts on average, if they choose evenly."""
    if not case.num_experts:
        return None
    batch = len(case.lengths)
    num_read = case.num_experts * (1 - (1 - case.num_chosen / case.num_experts) ** batch)
    return ExpertStep(batch, num_read, batch * case.num_chosen, case.num_experts)


def _projection(case: LayersCase, kernels: Any, weights: LayerWeights, settings: LayerSettings) -> Call:
    """Returns a sequence of one projection over the layers; each output feeds the next call through a narrow sum."""
    if case.num_experts:
        raise ValueError("the projections of layers with experts have no calls of their own")
    projection, dtype = case.projection, weights.input_norm.dtype.name
    cache, where = random_cache(case, dtype, is_empty=True)
    batch, matrix = len(case.lengths), getattr(weights, projection)
    parts: dict[str, Callable[..., jax.Array]] = {
        "o": lambda x, weights, layer: kernels.output(x, weights, None, layer=layer),
        "gate_up": lambda x, weights, layer: kernels.gate_up(x, weights, settings=settings, layer=layer),
        "down": lambda x, weights, layer: kernels.down(x, weights, None, layer=layer),
    }

    @partial(jax.jit, donate_argnums=1)
    def run(weights: LayerWeights, cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for layer in range(case.num_layers):
            if projection == "qkv":
                out, cache = kernels.qkv(x, weights, cache, where, _frequencies(case), settings=settings, layer=layer)
            else:
                out = parts[projection](x, weights, layer)
            x = x + out.reshape(batch, -1)[:, :1] * jnp.asarray(1e-3, x.dtype)
        return x, cache

    x = random_array((batch, matrix.shape[-1]), 8, dtype)
    return Call(
        run=lambda state: run(weights, state[1], state[0]),
        state=(x, cache),
        num_calls=case.num_layers,
        cost=least_cost(matrix, batch, x.dtype).times(1 / case.num_layers),
        result=lambda: run(weights, jnp.copy(cache), x)[0],
    )
