"""Declares the parameters of a model, quantized or not. Every parameter is an array with logical axes.

A quantized projection consists of several parameters: `data`, and a grid for each that its format has, such as `scale`.
Each has its own shape, dtype and axes, so that loading, storing, resharding and planning treat them like any other
parameter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.linear import Format, QuantizedMatrix
from meshserve.kernels.linear.formats import DATA

from ..model_files.quantization import Grid, Quantization, granule


class Weight(nnx.Param):
    """A model parameter.

    Metadata:
      axes: The logical axis of each dimension (see `sharding.mesh.RULES`).
      granule: For a part of a quantized matrix, the rows and columns of the matrix that one element describes.
      format: For a part of a quantized matrix, the matrix's format.
    """


class QuantizedWeight(nnx.Module):
    """The parameters of a quantized matrix. `weight[...]` is the matrix, as with a plain `Weight`."""

    def __init__(self, format: Format, parts: Mapping[str, Weight]):
        self.format = format
        for name, weight in parts.items():
            setattr(self, name, weight)

    def __getitem__(self, key: object) -> QuantizedMatrix:
        assert key is ..., "a quantized matrix is used as a whole"
        grids = {name: getattr(self, name)[...] for name in self.format.typical if hasattr(self, name)}
        return QuantizedMatrix(self.format, self.data[...], grids)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self[...].shape


def matrix_of(state: "nnx.State | nnx.Variable") -> Any:
    """Returns the value of a projection in a model's state: an array (or its shape), or a `QuantizedMatrix` of them."""
    if isinstance(state, nnx.Variable):
        return state.get_value()
    grids = {name: variable.get_value() for name, variable in state.items()}
    return QuantizedMatrix(state[DATA].format, grids.pop(DATA), grids)


@dataclass(frozen=True, kw_only=True)
class Declare:
    """Creates parameters of one dtype. With `stack`, all layers share one array, so that a step has few arguments."""

    dtype: jnp.dtype
    num_shards: int
    quantization: Quantization | None = None
    prefix: str = ""  # begins the declared parameters' names
    stack: tuple[int, ...] = ()

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype | None = None, **metadata: object
    ) -> Weight:
        """Declares an array of zeros."""
        axes = (None,) * len(self.stack) + axes
        return Weight(jnp.zeros(self.stack + shape, dtype or self.dtype), axes=axes, **metadata)

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        row_unit: int = 0,
        *,
        is_slice: bool = False,
    ) -> Weight | QuantizedWeight:
        """Declares a projection [..., out, in], quantized if the model's quantization covers it.

        Args:
          name: Name of the parameter, without the prefix.
          shape: Its shape.
          axes: The logical axes.
          row_unit: Rows that stay together and begin at a multiple of their number in the stored matrix, such as those
            of a head; 0 means that all rows have the order of the stored matrix.
          is_slice: Whether the columns are a slice of those of the stored matrix, although their axis is not sharded.
        """
        quantization = self.quantization
        if quantization is None or self.prefix + name not in quantization.parameters:
            return self(shape, axes)
        format, (*leading, columns) = quantization.format, shape
        data = self(
            (*leading, columns // format.packed), axes, format.storage, granule=(1, format.packed), format=format
        )
        parts = {DATA: data}
        for grid in quantization.grids:
            row_block, column_block = grid.block
            if row_unit:
                row_granule = math.gcd(row_block, row_unit)
            else:
                row_granule = granule(row_block, shape[-2], self._num_parts(axes[-2]))
            if is_slice and column_block:  # a slice that is smaller than a block may have parts of two
                column_granule = math.gcd(column_block, columns)
            else:
                column_granule = granule(column_block, columns, self._num_parts(axes[-1]))
            parts[grid.part] = self._grid(grid, shape, axes, (row_granule, column_granule), format)
        return QuantizedWeight(format, parts)

    def _grid(
        self,
        grid: Grid,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        granules: tuple[int, int],
        format: Format,
    ) -> Weight:
        *leading, rows, columns = shape
        row_block, column_block = grid.block
        return self(
            (*leading, rows // granules[0], columns // granules[1]),
            (*axes[:-2], axes[-2] if row_block else None, axes[-1] if column_block else None),
            jnp.dtype(grid.dtype),
            granule=granules,
            format=format,
        )

    def _num_parts(self, axis: str | None) -> int:
        return 1 if axis is None else self.num_shards
