"""4-bit integers, two in a byte: an element is (number - zero point) * scale, with numbers in 0..15."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from .contract import SCALE, ZERO, Array, Format

SYMMETRIC_ZERO = 8  # the number that means 0 in a matrix without zero points
_DEVIATION = 4.6  # standard deviation of uniform integers from 0 to 15


class _Int4(Format):
    """Column 2j is the low half of byte j. Zero points, uint8, are optional."""

    name, dtype, storage, packed = "int4", jnp.dtype("int4"), jnp.dtype("uint8"), 2
    typical = {SCALE: 1.0 / _DEVIATION, ZERO: SYMMETRIC_ZERO}

    def unpack(self, data: Array) -> Array:
        """See `Format`. The numbers are uint8."""
        pairs = data.__array_namespace__().stack([data & 15, data >> 4], axis=-1)
        return pairs.reshape(*data.shape[:-1], -1)

    def pack(self, numbers: Array) -> Array:
        """See `Format`."""
        return numbers[..., 0::2] | (numbers[..., 1::2] << 4)

    def elements(self, numbers: Array, grids: Mapping[str, Array]) -> Array:
        """See `Format`."""
        return (numbers - grids.get(ZERO, np.float32(SYMMETRIC_ZERO))) * grids[SCALE]


INT4 = _Int4()
