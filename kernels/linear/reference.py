"""Reference implementation of the linear operation: the matrix is dequantised and multiplied in float32."""

import jax
import jax.numpy as jnp

from .matrix import Matrix, QuantisedMatrix, dequantised
from .prologue import Prologue


def linear(
    x: jax.Array,
    weight: Matrix,
    *,
    out_dtype: jnp.dtype | None = None,
    prologue: Prologue | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """See `Linear`."""
    x = x if prologue is None else prologue(x)
    matrix = dequantised(weight) if isinstance(weight, QuantisedMatrix) else weight.astype(jnp.float32)
    matrix = matrix.reshape(-1, x.shape[1])
    product = jnp.einsum("tk,nk->tn", x.astype(jnp.float32), matrix, precision="highest")
    product = product.astype(out_dtype or x.dtype)
    return product if residual is None else residual + product
