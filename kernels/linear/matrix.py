"""Quantized matrices. See the package for the dimensions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .formats import SCALE, ZERO, Format


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix [..., N, K] of numbers in a format, and grids of scales and zero points that give them their values."""

    format: Format = field(metadata={"static": True})
    data: jax.Array  # [..., N, K / format.packed]
    grids: Mapping[str, jax.Array]  # [..., N / n, K / k] each, by the names in `Format.typical`

    @property
    def scale(self) -> jax.Array:
        """The scales, of any float dtype, or their exponents, if the format has such."""
        return self.grids[SCALE]

    @property
    def zero(self) -> jax.Array | None:
        """The zero points, or None if the matrix has none."""
        return self.grids.get(ZERO)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of one number."""
        return self.format.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that this represents."""
        *rest, columns = self.data.shape
        return (*rest, columns * self.format.packed)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        rows, columns = self.shape[-2:]
        return rows // self.scale.shape[-2], columns // self.scale.shape[-1]


Matrix = jax.Array | QuantizedMatrix


def dequantized(matrix: QuantizedMatrix) -> jax.Array:
    """Returns the matrix [..., N, K] in float32. FP8 elements are exact but for the rounding of one multiplication."""
    rows, columns = matrix.block
    *rest, row_blocks, column_blocks = matrix.scale.shape

    def of_blocks(grid: jax.Array) -> jax.Array:
        grid = grid.astype(jnp.float32)
        for axis in (-2, -1):  # a grid of larger rectangles, such as one scale of the whole matrix
            if grid.shape[axis] < matrix.scale.shape[axis]:
                grid = jnp.repeat(grid, matrix.scale.shape[axis] // grid.shape[axis], axis=axis)
        return grid[..., :, None, :, None]

    numbers = matrix.format.unpack(matrix.data).astype(jnp.float32)
    numbers = numbers.reshape(*rest, row_blocks, rows, column_blocks, columns)
    grids = {name: of_blocks(grid) for name, grid in matrix.grids.items()}
    return matrix.format.elements(numbers, grids).reshape(matrix.shape)


def layer_of(stack: Matrix, index: Any) -> jax.Array:
    """Returns the matrices at an index of a stack's leading dimensions, in float32 if they are quantized."""
    part = jax.tree.map(lambda array: array[index], stack)
    return dequantized(part) if isinstance(part, QuantizedMatrix) else part
