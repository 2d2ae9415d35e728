"""Tells how evenly the tokens of a decode step fall on the experts of a model, and on devices that hold whole experts.

A program of its own runs the model once and counts, in every layer with experts, what the last token of each of some
random requests chose. A server counts in its steps instead, for its metrics (`program/expert_tokens.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from meshserve.kernels.experts import ExpertWeights, Routing
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.runtime.model import strategies
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model.strategies import StepInputs
from meshserve.runtime.program.expert_balance import imbalance
from meshserve.runtime.program.step import CACHE_AXES, CacheShape, state_shapes
from meshserve.runtime.resolve.resolved_server import PlacedServer
from meshserve.sharding.mesh import TENSOR_AXIS, partition_spec

_REQUEST_TOKENS = 8  # attention over a few tokens sets the hidden states of requests apart


def with_skewed_router(params: nnx.State, exponent: float) -> nnx.State:
    """Returns the parameters with the router's row of expert e multiplied by (e + 1) ** -exponent.

    Scores of the first experts then vary most, so tokens choose these more often.
    """

    def skew(path: tuple[Any, ...], weight: nnx.Variable) -> nnx.Variable:
        if path[-1] != "router":
            return weight
        rows = weight.get_value()
        factors = (jnp.arange(rows.shape[-2]) + 1.0) ** -exponent
        return weight.replace((rows * factors[:, None]).astype(rows.dtype))

    return nnx.from_flat_state([(path, skew(path, weight)) for path, weight in nnx.to_flat_state(params)])


def expert_tokens(
    server: PlacedServer, structure: nnx.GraphDef, params: nnx.State, num_requests: int, seed: int = 0
) -> np.ndarray:
    """Returns how many of `num_requests` tokens chose each expert, [layers with experts, experts]."""
    model, layout, experts = server.model, server.layout, server.layout.experts
    assert experts is not None
    shape = CacheShape(num_requests, server.limits.page_size, num_requests, 1)
    cache = state_shapes(model, layout, shape, server.cache_dtype).cache
    num_tokens = num_requests * _REQUEST_TOKENS
    token_ids = np.random.default_rng(seed).integers(0, model.vocab_size, num_tokens).astype(np.int32)
    index = jnp.arange(num_tokens)
    batch = PagedBatch(index % _REQUEST_TOKENS, index // _REQUEST_TOKENS, jnp.arange(num_requests)[:, None])
    last = index[_REQUEST_TOKENS - 1 :: _REQUEST_TOKENS]

    def forward(params: nnx.State, cache: jax.Array) -> jax.Array:
        counts = []

        def count(x: jax.Array, weights: ExpertWeights, routing: Routing, **others: Any) -> jax.Array:
            chosen = routing.experts if len(routing.experts) == num_requests else routing.experts[last]
            is_chosen = chosen[:, :, None] == jnp.arange(experts.block_experts)
            counts.append(jnp.sum(is_chosen, axis=(0, 1), dtype=jnp.int32))
            return server.kernels.experts(x, weights, routing, **others)

        kernels = dataclasses.replace(server.kernels, experts=count, decode=None, is_unrolled=True)
        step = StepInputs(jnp.asarray(token_ids), batch, kernels.products, last)
        strategies.forward(nnx.merge(structure, params), kernels, cache, step)
        return jnp.stack(counts)

    program = jax.shard_map(
        forward,
        mesh=server.mesh,
        in_specs=(specs_of(params), partition_spec(CACHE_AXES)),
        out_specs=PartitionSpec(None, TENSOR_AXIS if experts.is_by_expert else None),
        check_vma=False,  # split by tensor, all shards count the same
    )
    counts = jax.jit(program)(params, jnp.zeros(cache.shape, cache.dtype))
    return np.asarray(counts)[:, : experts.num_experts]


def balance_text(counts: np.ndarray, num_devices: int) -> str:
    """Returns a line about the balance of experts, and of devices that hold whole experts (1: none does)."""
    read = np.count_nonzero(counts, axis=1).mean()
    text = (
        f"balance: a layer reads {read:.1f} of {counts.shape[1]} experts on average, the busiest has "
        f"{imbalance(counts):.2f} times the mean"
    )
    if num_devices == 1:
        return text
    padding = -counts.shape[1] % num_devices
    devices = np.pad(counts, ((0, 0), (0, padding))).reshape(len(counts), num_devices, -1).sum(axis=2)
    listed = ", ".join(f"{tokens:.0f}" for tokens in devices.mean(axis=0))
    return f"{text}; tokens of each device: {listed}, the busiest {imbalance(devices):.2f} times the mean"
