"""Reference implementation of the linear operation: the matrix is dequantized and multiplied in float32."""

import math

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost

from .contract import LinearImplementation, dequantizing_cost, least_cost
from .matrix import Matrix, QuantizedMatrix, dequantized
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
    matrix = dequantized(weight) if isinstance(weight, QuantizedMatrix) else weight.astype(jnp.float32)
    matrix = matrix.reshape(-1, x.shape[1])
    product = jnp.einsum("tk,nk->tn", x.astype(jnp.float32), matrix, precision="highest")
    product = product.astype(out_dtype or x.dtype)
    return product if residual is None else residual + product


def cost(matrix: Matrix, num_tokens: int, dtype: jnp.dtype) -> Cost:
    """Estimates the cost: plain matrices are converted to float32 as well."""
    del dtype
    if isinstance(matrix, QuantizedMatrix) or matrix.dtype == jnp.float32:
        return dequantizing_cost(matrix, num_tokens, jnp.dtype("float32"))
    num_bytes = 4 * math.prod(matrix.shape)
    converted = Cost(num_bytes=2 * num_bytes, scratch_bytes=num_bytes)
    return least_cost(matrix, num_tokens, jnp.dtype("float32")) + converted


IMPLEMENTATION = LinearImplementation(name="reference", linear=linear, cost=cost, note="which dequantizes in float32")
