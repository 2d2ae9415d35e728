"""The embedding of tokens, whose rows are sharded by vocabulary."""

import jax
import jax.numpy as jnp

from meshserve.sharding.collectives import P2PAllReduce, all_reduce
from meshserve.sharding.mesh import TENSOR_AXIS


def embed(table: jax.Array, token_ids: jax.Array, p2p_all_reduce: P2PAllReduce | None) -> jax.Array:
    """Looks up ids [T] in an embedding whose rows are sharded. Returns [T, D].

    Each shard looks up the ids of its part of the vocabulary and contributes zeros for the others.
    """
    num_rows = table.shape[0]
    local = token_ids - jax.lax.axis_index(TENSOR_AXIS) * num_rows
    is_here = (local >= 0) & (local < num_rows)
    rows = table[jnp.clip(local, 0, num_rows - 1)]
    return all_reduce(jnp.where(is_here[:, None], rows, 0), p2p_all_reduce)
