"""Residual connections around products whose summands are spread over the shards."""

from collections.abc import Callable

import jax

from meshserve.sharding.collectives import P2PAllReduce, all_reduce
from meshserve.sharding.mesh import TENSOR_AXIS


def add_product(x: jax.Array, product: Callable[..., jax.Array], p2p_all_reduce: P2PAllReduce | None) -> jax.Array:
    """Returns x plus the all-reduced product with a matrix whose columns are sharded: `Linear` with its operands."""
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return product(residual=x)
    return x + all_reduce(product(), p2p_all_reduce)
