"""4-bit floats (e2m1), two in a byte: NVFP4 and MXFP4, which differ in their scales.

An element is the number times its scale, which NVFP4 has in two factors. Both are multiplied in float32, as NVIDIA's
ModelOpt defines it, bit for bit.
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from .contract import SCALE, Array, Format

FP4 = jnp.dtype("float4_e2m1fn")
FP4_MAX = 6.0  # the largest number; the others are 0, 0.5, 1, 1.5, 2, 3 and 4
TENSOR_SCALE = "tensor_scale"  # by which all scales of a matrix are multiplied
EXPONENT_BIAS = 127  # of a scale that is a power of two
_DEVIATION = math.sqrt(68.5 / 8)  # standard deviation of uniform codes
_TYPICAL_SCALE = 64.0  # of NVFP4, so that those of small weights are normal e4m3 numbers
_SMALLEST = np.uint32(1 << 22)  # the bits of 2^-127 in float32


class _E2M1(Format):
    """Column 2j is the low half of byte j. The highest bit of a number is its sign."""

    dtype, storage, packed = FP4, jnp.dtype("uint8"), 2

    def unpack(self, data: Array) -> Array:
        """See `Format`. The numbers are float32."""
        library = data.__array_namespace__()
        codes = library.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        low = codes & 7  # a bit of fraction and two of exponent; twice the number is a whole one
        exponent = library.where(low > 1, low >> 1, low | 1)
        twice = library.where(low > 1, ((low & 1) | 2) << (exponent - 1), low).astype("float32")
        return library.where(codes > 7, twice * np.float32(-0.5), twice * np.float32(0.5))

    def pack(self, numbers: Array) -> Array:
        """See `Format`."""
        library = numbers.__array_namespace__()
        twice = (library.abs(numbers) * np.float32(2)).astype("uint8")
        low = library.where(twice < 4, twice, library.where(twice < 8, (twice >> 1) + 2, (twice >> 2) + 4))
        codes = (low | (library.signbit(numbers).astype("uint8") << 3)).astype("uint8")
        return codes[..., 0::2] | (codes[..., 1::2] << 4)


class _NVFP4(_E2M1):
    """A scale in e4m3 for each 16 columns, and a float32 scale of the whole matrix."""

    name = "nvfp4"
    typical = {SCALE: _TYPICAL_SCALE, TENSOR_SCALE: 1.0 / (_TYPICAL_SCALE * _DEVIATION)}

    def elements(self, numbers: Array, grids: Mapping[str, Array]) -> Array:
        """See `Format`."""
        return numbers * (grids[SCALE] * grids[TENSOR_SCALE])


class _MXFP4(_E2M1):
    """A power of two for each 32 columns, of which the exponent is stored with a bias, in a byte (e8m0)."""

    name = "mxfp4"
    typical = {SCALE: EXPONENT_BIAS - 2.0}

    def typical_grid(self, part: str, deviation: float) -> float:
        """See `Format`."""
        return EXPONENT_BIAS + round(math.log2(deviation / _DEVIATION))

    def elements(self, numbers: Array, grids: Mapping[str, Array]) -> Array:
        """See `Format`. 0 is 2^-127, and 255, which means no number, infinity."""
        library = numbers.__array_namespace__()
        exponents = library.asarray(grids[SCALE]).astype("uint32")
        return numbers * library.where(exponents == 0, _SMALLEST, exponents << 23).view("float32")


NVFP4 = _NVFP4()
MXFP4 = _MXFP4()
