"""The linear operation in operations that XLA compiles for any backend.

XLA may keep one dequantized matrix in memory while it multiplies, so a quantized model saves memory here, but no time:
the bytes of the full matrix are written and read again.
"""

import jax
import jax.numpy as jnp

from .contract import LinearImplementation, dequantizing_cost
from .formats import E4M3, quantized_activations
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
    """See `Linear`. A dequantized matrix is rounded to the dtype of x; activations keep their precision."""
    product = _dequantized_product(x if prologue is None else prologue(x), weight, out_dtype)
    return product if residual is None else residual + product


def _dequantized_product(x: jax.Array, weight: Matrix, out_dtype: jnp.dtype | None) -> jax.Array:
    if not isinstance(weight, QuantizedMatrix):
        return _product(x, weight, out_dtype)
    if weight.format != E4M3 or weight.block != (1, x.shape[1]):
        return _product(x, dequantized(weight).astype(x.dtype), out_dtype)
    product = _product(x, weight.data.astype(x.dtype), jnp.dtype("float32"))  # a scale of a row can be applied to it
    return (product * weight.scale.astype(jnp.float32).reshape(1, -1)).astype(out_dtype or x.dtype)


def linear_fp8(
    x: jax.Array,
    weight: Matrix,
    *,
    out_dtype: jnp.dtype | None = None,
    prologue: Prologue | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """See `Linear`. With an FP8 matrix, activations are also rounded to FP8, as in FP8 checkpoints' own inference code.

    A token's activations have one scale for the columns of each block of the matrix: 128 for the published block
    format, less where a shard's blocks are smaller; all of a shard's columns for a matrix with a scale per row.
    """
    product = _rounded_product(x if prologue is None else prologue(x), weight, out_dtype)
    return product if residual is None else residual + product


def _rounded_product(x: jax.Array, weight: Matrix, out_dtype: jnp.dtype | None) -> jax.Array:
    if not isinstance(weight, QuantizedMatrix) or weight.format != E4M3:
        return _dequantized_product(x, weight, out_dtype)
    rows, columns = weight.block
    numbers, scale = quantized_activations(x, columns)
    if columns == x.shape[1] and rows == 1:  # the scales can be applied to the product
        data = weight.data.reshape(-1, columns)
        product = jnp.einsum("tk,nk->tn", numbers, data, preferred_element_type=jnp.float32)
        product = product * scale * weight.scale.astype(jnp.float32).reshape(1, -1)
        return product.astype(out_dtype or x.dtype)
    groups = numbers.astype(jnp.float32).reshape(*scale.shape, columns) * scale[..., None]
    return _product(groups.reshape(x.shape).astype(x.dtype), dequantized(weight).astype(x.dtype), out_dtype)


def _product(x: jax.Array, matrix: jax.Array, out_dtype: jnp.dtype | None) -> jax.Array:
    return jnp.einsum(
        "tk,nk->tn",
        x,
        matrix.reshape(-1, x.shape[1]),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )


IMPLEMENTATION = LinearImplementation(
    name="xla",
    automatic_on=("cpu", "gpu", "tpu"),
    measured_on=("h100", "h200"),
    reached=0.64,  # prompts of 1,024 to 131,000 tokens, without quantized weights (docs/plan.md)
    linear=linear,
    cost=dequantizing_cost,
    note="which dequantizes: memory is saved, time is not",
)
ROUNDING = LinearImplementation(
    name="xla_fp8",
    linear=linear_fp8,
    cost=dequantizing_cost,
    note="which rounds activations to FP8 and dequantizes: memory is saved, time is not",
)
