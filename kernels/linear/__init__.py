"""Multiplies activations by a weight matrix, which may be quantized to 8 or 4 bits, on one device's block.

A quantized matrix is one value: its format, the numbers, and a scale for each rectangle of n rows and k columns, which
follow from the shapes. A shard of a published matrix whose blocks do not align with it holds its scales for smaller
rectangles, so a matrix on one device is always complete in itself.

Dimensions: T tokens, N outputs (rows of the matrix), K inputs (columns).
"""

from meshserve.kernels.implementation import in_order

from . import reference, sm80, sm90, xla
from .contract import Linear, LinearImplementation, LinearShapes
from .formats import E4M3, FORMATS, FP8, FP8_MAX, INT4, Format, quantized_activations, to_fp8
from .matrix import Matrix, QuantizedMatrix, dequantized, layer_of
from .prologue import Prologue, RMSNorm, inverse_rms, rms_norm, silu_product

__all__ = [
    "E4M3",
    "FORMATS",
    "FP8",
    "FP8_MAX",
    "IMPLEMENTATIONS",
    "INT4",
    "Format",
    "Linear",
    "LinearImplementation",
    "LinearShapes",
    "Prologue",
    "Matrix",
    "QuantizedMatrix",
    "RMSNorm",
    "dequantized",
    "implementation",
    "inverse_rms",
    "layer_of",
    "quantized_activations",
    "rms_norm",
    "silu_product",
    "to_fp8",
]


# In order of preference for quantized weights: cuda_fp8 (rounds activations to FP8 and multiplies on FP8 tensor cores
# of Hopper GPUs; what it cannot multiply is left to xla), portable (on GPUs since Ampere, reads quantized weights once
# for few tokens) and, on any backend, xla (dequantizes in the dtype of the activations), xla_fp8 (rounds activations
# like cuda_fp8 before that) and reference (dequantizes in float32).
IMPLEMENTATIONS = in_order(
    sm90.IMPLEMENTATION, sm80.IMPLEMENTATION, xla.IMPLEMENTATION, xla.ROUNDING, reference.IMPLEMENTATION
)


def implementation(name: str) -> Linear:
    """Returns the product of a named implementation, on any device: what it cannot multiply is left to XLA.

    Raises:
      ValueError: There is no such implementation.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"linear is {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    return IMPLEMENTATIONS[name].linear
