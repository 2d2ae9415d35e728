"""Multiplies activations by a weight matrix, which may be quantised to 8 or 4 bits, on one device's block.

A quantised matrix is one value: the numbers, and a scale for each rectangle of n rows and k columns, which follow from
the shapes. A shard of a published matrix whose blocks do not align with it holds its scales for smaller rectangles, so
a matrix on one device is always complete in itself.

Dimensions: T tokens, N outputs (rows of the matrix), K inputs (columns).
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from . import gpu, reference, xla
from .matrix import (
    FP8,
    FP8_MAX,
    SYMMETRIC_ZERO,
    Matrix,
    QuantisedMatrix,
    dequantised,
    layer_of,
    quantised_activations,
    to_fp8,
    unpacked,
)
from .prologue import Prologue, RMSNorm, inverse_rms, rms_norm, silu_product

__all__ = [
    "FP8",
    "FP8_MAX",
    "SYMMETRIC_ZERO",
    "Prologue",
    "Matrix",
    "QuantisedMatrix",
    "RMSNorm",
    "dequantised",
    "inverse_rms",
    "layer_of",
    "quantised_activations",
    "rms_norm",
    "silu_product",
    "to_fp8",
    "unpacked",
]


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


IMPLEMENTATIONS: dict[str, Linear] = {
    "reference": reference.linear,
    "xla": xla.linear,
    "xla_fp8": xla.linear_fp8,
    "cuda_fp8": gpu.linear,
}


def implementation(name: str) -> Linear:
    """Returns the named implementation.

    Args:
      name: "reference" (dequantises in float32), "xla" (dequantises in the dtype of the activations), "xla_fp8", which
        also rounds the activations to FP8 before a product with FP8 weights, with a scale for each token and the
        columns of each weight block, or "cuda_fp8", which computes the same as "xla_fp8" on the FP8 tensor cores of a
        Hopper GPU where it can, and else as "xla". The others run on any backend.

    Raises:
      ValueError: there is no such implementation.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"linear is {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    return IMPLEMENTATIONS[name]
