"""Random parameters created on the devices, for measuring model sizes without their files."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.kernels.linear.formats import DATA
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import named_sharding

from ..model_files.model_config import ModelConfig
from .registry import abstract_model

_STANDARD_DEVIATION = 0.02  # usual initialization: activations stay in range through all layers
# With it, hidden states of different tokens soon resemble each other, and the router would prefer few experts. An
# embedding as wide as the layers' outputs keeps them apart, so that tokens choose experts about uniformly.
_EMBEDDING_DEVIATION_WITH_EXPERTS = 1.0
_MOST_ELEMENTS = 1 << 32  # drawn at once; larger arrays, as of experts, are drawn layer by layer to need less memory


def random_model(
    config: ModelConfig, layout: ShardLayout, mesh: Mesh, dtype: jnp.dtype, *, seed: int = 0
) -> tuple[nnx.GraphDef, nnx.State]:
    """Like `load.load_model`, but with random parameters: norms are ones, all others are normally distributed."""
    structure, abstract = abstract_model(config, layout, dtype)
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(abstract))))

    def fill(path: tuple[str, ...], weight: nnx.Variable) -> nnx.Variable:
        sharding, dtype = named_sharding(mesh, weight.axes), weight.get_value().dtype
        make = partial(_maker(path, weight, config), shape=weight.shape, dtype=dtype)
        return weight.replace(jax.jit(make, out_shardings=sharding)(next(keys)))

    flat = [(path, fill(path, weight)) for path, weight in nnx.to_flat_state(abstract)]
    return structure, nnx.from_flat_state(flat)


def _maker(path: tuple[str, ...], weight: nnx.Variable, config: ModelConfig) -> Callable[..., jax.Array]:
    """Returns the function that makes a parameter. The elements of quantized matrices also have the usual deviation."""
    if "norm" in path[-1]:
        return _ones
    if path[-1] == DATA:
        return _numbers
    format = weight.get_metadata().get("format")
    if format is not None:
        return partial(_constant, value=format.typical_grid(path[-1], _STANDARD_DEVIATION))
    has_experts = path[-1] == "embedding" and config.experts is not None
    return partial(_normal, deviation=_EMBEDDING_DEVIATION_WITH_EXPERTS if has_experts else _STANDARD_DEVIATION)


def _normal(key: jax.Array, *, deviation: float, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if math.prod(shape) > _MOST_ELEMENTS:
        layer = partial(_normal, deviation=deviation, shape=shape[1:], dtype=dtype)
        return jax.lax.map(layer, jax.random.split(key, shape[0]))
    return deviation * jax.random.normal(key, shape, dtype)


def _numbers(key: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns numbers of deviation 1 in an 8-bit float, or uniform bits."""
    if math.prod(shape) > _MOST_ELEMENTS:
        return jax.lax.map(partial(_numbers, shape=shape[1:], dtype=dtype), jax.random.split(key, shape[0]))
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def _constant(key: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype, value: float) -> jax.Array:
    return jnp.full(shape, value, dtype)


def _ones(key: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.ones(shape, dtype)
