"""Collective operations between the shards within a step. This module alone selects their implementation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .mesh import TENSOR_AXIS

# Sums a bfloat16 array over the tensor axis by stores into the other devices' memory. The array must be a multiple of
# 64 bytes: 16 for each of four devices.
P2PAllReduce = Callable[[jax.Array], jax.Array]

# Gathers a small array [...] of each shard into [shards, ...], identical on all shards.
Exchange = Callable[[jax.Array], jax.Array]

# The largest array that the P2P all-reduce sums faster than XLA's all-reduce, by number of devices, as measured on
# H200s (docs/log/first_days.md). On four devices, larger ones were not measured.
_P2P_MAX_BYTES = {2: 64 << 20, 4: 8 << 20}


def p2p_max_bytes(num_devices: int) -> int:
    """Returns the largest array, in bytes, for which the P2P all-reduce is used instead of XLA's; 0 if never."""
    return _P2P_MAX_BYTES.get(num_devices, 0)


def all_gather(x: jax.Array) -> jax.Array:
    """Stacks the arrays of all shards into [shards, ...]. Call inside `shard_map`."""
    return jax.lax.all_gather(x, TENSOR_AXIS)


def _neighbors(size: int) -> list[list[int]]:
    """Returns the groups of `size` neighboring shards."""
    return [list(range(first, first + size)) for first in range(0, jax.lax.axis_size(TENSOR_AXIS), size)]


def gather_from_neighbors(x: jax.Array, size: int, *, axis: int) -> jax.Array:
    """Concatenates along `axis` the arrays of each group of `size` neighboring shards. Call inside `shard_map`."""
    return jax.lax.all_gather(x, TENSOR_AXIS, axis=axis, tiled=True, axis_index_groups=_neighbors(size))


def exchange_with_neighbors(x: jax.Array, size: int, *, axis: int) -> jax.Array:
    """Sends part i along `axis` to shard i of each group of `size` neighboring shards. Call inside `shard_map`.

    Returns:
      [size, ...]: this shard's part of each of them.
    """
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    groups = _neighbors(size)
    return jax.lax.all_to_all(x.reshape(shape), TENSOR_AXIS, axis, 0, axis_index_groups=groups)


def all_reduce(x: jax.Array, p2p_all_reduce: P2PAllReduce | None = None) -> jax.Array:
    """Sums x over the shards. Call inside `shard_map`.

    Args:
      x: this shard's summand.
      p2p_all_reduce: the P2P all-reduce of the mesh's devices, or None if they have none. It is used for the dtypes and
        sizes that it supports and for which it is faster.
    """
    num_devices = jax.lax.axis_size(TENSOR_AXIS)
    is_fit = x.dtype == jnp.bfloat16 and x.nbytes % 64 == 0 and x.nbytes <= p2p_max_bytes(num_devices)
    if p2p_all_reduce is not None and is_fit:
        return p2p_all_reduce(x)
    return jax.lax.psum(x, TENSOR_AXIS)
