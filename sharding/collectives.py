"""What shards tell each other within a step: the one place that chooses how."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .mesh import TENSOR_AXIS

# The sum over the tensor axis by stores into each other's memory, for arrays of bfloat16 in multiples of 64 bytes: 16
# for each of four devices.
P2PAllReduce = Callable[[jax.Array], jax.Array]

# Gathers a small array [...] of each shard into [shards, ...], equal on all of them.
Exchange = Callable[[jax.Array], jax.Array]

# Up to so many bytes peers add up faster than XLA's all-reduce, by the number of devices: as far as it was measured on
# H200s (docs/log). On four, nothing has been timed above what goes in one shot.
_P2P_MAX_BYTES = {2: 64 << 20, 4: 2 << 20}


def p2p_max_bytes(num_devices: int) -> int:
    """Of an array, the most that peers add up rather than XLA."""
    return _P2P_MAX_BYTES.get(num_devices, 0)


def all_gather(x: jax.Array) -> jax.Array:
    """The arrays of all shards, stacked: [shards, ...]. Call inside `shard_map`."""
    return jax.lax.all_gather(x, TENSOR_AXIS)


def all_reduce(x: jax.Array, p2p_all_reduce: P2PAllReduce | None = None) -> jax.Array:
    """The sum of x over the shards. Call inside `shard_map`.

    Args:
      x: this shard's share.
      p2p_all_reduce: of the mesh's devices, where they have it; it serves the sizes at which it is the faster.
    """
    num_devices = jax.lax.axis_size(TENSOR_AXIS)
    is_fit = x.dtype == jnp.bfloat16 and x.nbytes % 64 == 0 and x.nbytes <= p2p_max_bytes(num_devices)
    if p2p_all_reduce is not None and is_fit:
        return p2p_all_reduce(x)
    return jax.lax.psum(x, TENSOR_AXIS)
