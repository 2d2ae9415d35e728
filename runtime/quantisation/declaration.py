"""Declares the parameters of a model, quantised or not. Every parameter is an array with logical axes.

A quantised projection consists of several parameters: `data`, `scale`, and `zero` if it has zero points. Each has its
own shape, dtype and axes, so that loading, storing, resharding and planning treat them like any other parameter.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.linear import QuantisedMatrix

from ..api.quantisation import Quantisation, granule


class Weight(nnx.Param):
    """A model parameter.

    Metadata:
      axes: The logical axis of each dimension (see `sharding.mesh.RULES`).
      granule: Of a part of a quantised matrix: rows and columns of the matrix that one element describes.
    """


class QuantisedWeight(nnx.Module):
    """The parameters of a quantised matrix. `weight[...]` is the matrix, as with a plain `Weight`."""

    def __init__(self, data: Weight, scale: Weight, zero: Weight | None):
        self.data, self.scale = data, scale
        if zero is not None:
            self.zero = zero

    def __getitem__(self, key: object) -> QuantisedMatrix:
        assert key is ..., "a quantised matrix is used as a whole"
        zero = getattr(self, "zero", None)
        return QuantisedMatrix(self.data[...], self.scale[...], None if zero is None else zero[...])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self[...].shape


def matrix_of(state: "nnx.State | nnx.Variable") -> Any:
    """Returns the value of a projection in a model's state: an array (or its shape), or a `QuantisedMatrix` of them."""
    if isinstance(state, nnx.Variable):
        return state.get_value()
    return QuantisedMatrix(**{name: variable.get_value() for name, variable in state.items()})


@dataclass(frozen=True, kw_only=True)
class Declare:
    """Creates parameters of one dtype. With `stack`, all layers share one array, so that a step has few arguments."""

    dtype: jnp.dtype
    num_shards: int
    quantisation: Quantisation | None = None
    prefix: str = ""  # of the names of the parameters that are declared
    stack: tuple[int, ...] = ()

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype | None = None, **metadata: object
    ) -> Weight:
        """Declares an array of zeros."""
        axes = (None,) * len(self.stack) + axes
        return Weight(jnp.zeros(self.stack + shape, dtype or self.dtype), axes=axes, **metadata)

    def matrix(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], row_unit: int = 0
    ) -> Weight | QuantisedWeight:
        """Declares a projection [..., out, in], quantised if the model's quantisation covers it.

        Args:
          name: Name of the parameter, without the prefix.
          shape: Its shape.
          axes: The logical axes.
          row_unit: Rows that stay together and begin at a multiple of their number in the stored matrix, such as those
            of a head; 0 means that all rows have the order of the stored matrix.
        """
        quantisation = self.quantisation
        if quantisation is None or self.prefix + name not in quantisation.parameters:
            return self(shape, axes)
        *leading, rows, columns = shape
        row_block, column_block = quantisation.block
        row_granule = math.gcd(row_block, row_unit) if row_unit else granule(row_block, rows, self._num_parts(axes[-2]))
        column_granule = granule(column_block, columns, self._num_parts(axes[-1]))
        grid = (*leading, rows // row_granule, columns // column_granule)
        grid_axes = (*axes[:-1], axes[-1] if column_block else None)
        per_byte = 2 if quantisation.is_int4 else 1
        data = self(
            (*leading, rows, columns // per_byte),
            axes,
            jnp.dtype("uint8" if quantisation.is_int4 else quantisation.dtype),
            granule=(1, per_byte),
        )

        def of_grid(dtype: str) -> Weight:
            return self(grid, grid_axes, jnp.dtype(dtype), granule=(row_granule, column_granule))

        zero = of_grid("uint8") if quantisation.has_zero_points else None
        return QuantisedWeight(data, of_grid(quantisation.scale_dtype), zero)

    def _num_parts(self, axis: str | None) -> int:
        return 1 if axis is None else self.num_shards
