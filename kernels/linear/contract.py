"""The contract of products with weights, and how an implementation is described. See the package for the dimensions."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost, Implementation

from .matrix import Matrix, QuantizedMatrix
from .prologue import Prologue


class Linear(Protocol):
    """The interface of an implementation."""

    def __call__(
        self,
        x: jax.Array,
        weight: Matrix,
        *,
        out_dtype: jnp.dtype | None = None,
        prologue: Prologue | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Computes x weight^T, or residual + x weight^T.

        Args:
          x: [T, K] bfloat16 or float32, or what `prologue` takes.
          weight: [..., N, K]. Leading dimensions are treated as further rows.
          out_dtype: dtype of the result; None means x's.
          prologue: Operation on x before the product, such as `RMSNorm` or `silu_product`; None means none.
          residual: [T, rows] of the result's dtype; None means none.

        Returns:
          [T, rows], accumulated in float32. float32 inputs are multiplied in full float32 precision.
        """
        ...


class LinearCost(Protocol):
    """Estimates what the product of `num_tokens` tokens with a matrix (or its shapes) takes."""

    def __call__(self, matrix: Matrix, num_tokens: int, dtype: jnp.dtype) -> Cost: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearShapes:
    """The quantized matrices of a layer on one device's block, which decide whether an implementation can serve."""

    matrices: Mapping[str, QuantizedMatrix]  # or their shapes, by name
    dtype: jnp.dtype  # of activations


class UnsupportedMatrix(Protocol):
    """Says why the product with a matrix is left to XLA, or None if it is not."""

    def __call__(self, weight: Matrix, dtype: jnp.dtype) -> str | None: ...


def _takes_all(weight: Matrix, dtype: jnp.dtype) -> str | None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearImplementation(Implementation[LinearShapes]):
    """An implementation of products with weights."""

    linear: Linear
    cost: LinearCost
    unsupported_matrix: UnsupportedMatrix = _takes_all
    has_fp8_products: bool = False  # multiplies FP8 weights by rounded activations on tensor cores
    note: str  # what it does with quantized weights, for the log


def none_taken(unsupported: UnsupportedMatrix, shapes: LinearShapes) -> str | None:
    """Returns why an implementation leaves each of a layer's quantized matrices to XLA, or None if it takes one."""
    reasons = [unsupported(matrix, shapes.dtype) for matrix in shapes.matrices.values()]
    return reasons[0] if reasons and all(reasons) else None


def stored_bytes(matrix: Matrix) -> int:
    """Returns the bytes of a matrix (or its shapes) as it is stored, with its scales."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(matrix))


def product_operations(matrix: Matrix, num_tokens: float) -> float:
    """Returns the operations of the product of tokens with a matrix."""
    return 2.0 * num_tokens * math.prod(matrix.shape)


def least_cost(matrix: Matrix, num_tokens: int, dtype: jnp.dtype) -> Cost:
    """Returns the cost of an implementation that reads the matrix once, as it is stored, and multiplies in `dtype`."""
    num_bytes, operations = stored_bytes(matrix), product_operations(matrix, num_tokens)
    if jnp.dtype(dtype).itemsize > 2:
        return Cost(num_bytes=num_bytes, float32_operations=operations)
    return Cost(num_bytes=num_bytes, operations=operations)


def dequantizing_cost(matrix: Matrix, num_tokens: int, dtype: jnp.dtype) -> Cost:
    """Returns the cost of an implementation that writes a quantized matrix in `dtype` and reads that."""
    cost = least_cost(matrix, num_tokens, dtype)
    if not isinstance(matrix, QuantizedMatrix):
        return cost
    num_bytes = math.prod(matrix.shape) * jnp.dtype(dtype).itemsize
    return cost + Cost(num_bytes=2 * num_bytes, scratch_bytes=num_bytes)
