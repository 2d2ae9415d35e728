"""Checks the sums of the P2P all-reduce, because stores may get lost although the driver reports peer access."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .contract import P2PGroup, P2POperations

_NUM_SUMS = 100  # for each size
_KILOBYTES = (4, 512, 4096)  # array sizes; the last one takes two shots
_LEVELS = 16  # number of distinct values of a summand, so that bfloat16 holds the sums exactly


def num_wrong_elements(mesh: Mesh, p2p: P2PGroup, operations: P2POperations, max_bytes: int) -> int:
    """Runs 100 different sums for each array size up to `max_bytes`, and returns how many elements were wrong.

    Every device checks its own result; the count is the total over the devices.
    """
    spec = PartitionSpec(p2p.axis)
    ranks = jax.device_put(np.arange(mesh.size, dtype=np.int32), NamedSharding(mesh, spec))
    program = jax.shard_map(
        partial(_of_rank, p2p=p2p, operations=operations, max_bytes=max_bytes),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return int(np.asarray(jax.jit(program)(ranks)).sum())


def _of_rank(rank: jax.Array, p2p: P2PGroup, operations: P2POperations, max_bytes: int) -> jax.Array:
    """Returns the number of wrong elements on this device, [1] int32."""
    num_wrong = jnp.int32(0)
    for kilobytes in (size for size in _KILOBYTES if 1024 * size <= max_bytes):
        places = jnp.arange(512 * kilobytes, dtype=jnp.int32)

        def add(index: jax.Array, num_wrong: jax.Array, places: jax.Array = places) -> jax.Array:
            shares = [_share(places, other, index) for other in range(len(p2p.ordinals))]
            got = operations.p2p_all_reduce(_share(places, rank[0], index), p2p)
            return num_wrong + (got != sum(shares[1:], start=shares[0])).sum(dtype=jnp.int32)

        num_wrong = jax.lax.fori_loop(0, _NUM_SUMS, add, num_wrong)
    return num_wrong[None]


def _share(places: jax.Array, rank: jax.Array | int, index: jax.Array) -> jax.Array:
    return ((places + 5 * rank + index) % _LEVELS).astype(jnp.bfloat16)
