"""Grids of scales on the host: their names for loading, and their numbers for other granules.

A grid has an element for each rectangle of a matrix. `granule` is the size (rows, columns) of these rectangles.
"""

from typing import NamedTuple

import numpy as np

from meshserve.sharding.checkpoints.parameters import CheckpointError

Granule = tuple[int, int]


class PartName(NamedTuple):
    """The name by which loading asks a `Source` for a part of a matrix, such as `layers.0.attention.qkv.scale@64x128`.

    A scale or zero point is asked for in a granule, because that depends on how the matrix is sharded.
    """

    matrix: str
    part: str
    granule: Granule

    @classmethod
    def parse(cls, name: str) -> "PartName | None":
        """Returns None for the name of a tensor that is no part of a quantized matrix."""
        path, _, sizes = name.rpartition("@")
        if not path:
            return None
        matrix, _, part = path.rpartition(".")
        rows, _, columns = sizes.partition("x")
        return cls(matrix, part, (int(rows), int(columns)))

    def __str__(self) -> str:
        return f"{self.matrix}.{self.part}@{self.granule[0]}x{self.granule[1]}"


def grid_shape(shape: tuple[int, ...], granule: Granule) -> tuple[int, ...]:
    """Returns the shape of the grid over a matrix [..., N, K]."""
    *leading, rows, columns = shape
    return (*leading, -(-rows // granule[0]), -(-columns // granule[1]))


def regrid_indices(size: int, old: int, new: int) -> np.ndarray:
    """Returns, for each rectangle of `new` rows, which rectangle of `old` rows its first row lies in.

    Either divides the other, or both divide the blocks that share a scale, so that the first row speaks for all.
    """
    return np.arange(-(-size // new)) * new // old


def regridded(grid: np.ndarray, size: tuple[int, int], old: Granule, new: Granule) -> np.ndarray:
    """Returns a grid [..., N / n, K / k] over a matrix of `size` rows and columns for another granule."""
    rows = regrid_indices(size[0], old[0], new[0])
    columns = regrid_indices(size[1], old[1], new[1])
    return grid[..., rows[:, None], columns]


def converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Converts scales to another dtype.

    Raises:
      CheckpointError: A value would change.
    """
    if values.dtype == dtype:
        return values
    result = values.astype(dtype)
    if not np.array_equal(result.astype(np.float32), values.astype(np.float32)):
        raise CheckpointError(
            f"{name} is {values.dtype} and has values that {dtype} cannot hold; config.json says that scales are "
            f"{dtype}. Save the checkpoint with scales of this dtype."
        )
    return result
