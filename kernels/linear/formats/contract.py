"""The contract of a weight format on a device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

# Parts of a quantized matrix: its numbers, and grids with an element for each rectangle of the matrix.
DATA, SCALE, ZERO = "data", "scale", "zero"

Array = Any  # an array of JAX or numpy


class Format(ABC):
    """How the numbers of a quantized matrix are stored, and which values its elements have.

    The methods take arrays of JAX and of numpy alike, so that devices and host compute the same.
    """

    name: ClassVar[str]  # begins the names of quantizations, such as fp8-channel
    dtype: ClassVar[jnp.dtype]  # dtype of one number
    storage: ClassVar[jnp.dtype]  # dtype of the data, which may hold several numbers in an element
    packed: ClassVar[int] = 1  # numbers that an element of the data holds, along the columns
    # Each grid that a matrix may have, and its typical value: random data then have a standard deviation of about 1.
    typical: ClassVar[Mapping[str, float]]

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one number, without its share of a scale."""
        return self.storage.itemsize / self.packed

    def unpack(self, data: Array) -> Array:
        """Returns numbers [..., K] from data [..., K / packed]. Converted to float32 they have their values."""
        return data

    def pack(self, numbers: Array) -> Array:
        """Returns data [..., K / packed] from numbers as `unpack` returns them."""
        return numbers

    def typical_grid(self, part: str, deviation: float) -> float:
        """Returns the value of a grid with which elements of random data have about this standard deviation."""
        return deviation * self.typical[part] if part == SCALE else self.typical[part]

    @abstractmethod
    def elements(self, numbers: Array, grids: Mapping[str, Array]) -> Array:
        """Returns the elements of a matrix.

        Args:
          numbers: The numbers, in float32.
          grids: The matrix's grids in float32, in shapes that broadcast to that of the numbers.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return self.name
