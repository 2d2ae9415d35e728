"""How are the numbers of quantized weights stored, and which values do they have? One module for each format.

A format is an object without state. A kernel names the formats that it takes and asks a matrix for its own
(`QuantizedMatrix.format`); loading, storing and planning ask it for what they need and know no format by name. A new
one is a module here and an entry of `FORMATS`.
"""

from .contract import DATA, SCALE, ZERO, Format
from .fp4 import FP4, FP4_MAX, MXFP4, NVFP4, TENSOR_SCALE
from .fp8 import E4M3, FP8, FP8_MAX, quantized_activations, to_fp8
from .int4 import INT4, SYMMETRIC_ZERO

__all__ = [
    "DATA",
    "E4M3",
    "FORMATS",
    "FP4",
    "FP4_MAX",
    "FP8",
    "FP8_MAX",
    "INT4",
    "MXFP4",
    "NVFP4",
    "SCALE",
    "SYMMETRIC_ZERO",
    "TENSOR_SCALE",
    "ZERO",
    "Format",
    "quantized_activations",
    "to_fp8",
]

FORMATS: tuple[Format, ...] = (E4M3, INT4, NVFP4, MXFP4)
