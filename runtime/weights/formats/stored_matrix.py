"""The contract of a published layout: the tensors of one module's quantized matrix, and its numbers in our arrangement.

Every layout's numbers become those of `kernels.linear.QuantizedMatrix`, without loss.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np

from meshserve.kernels.linear.formats import INT4
from meshserve.sharding.checkpoints.parameters import Region
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ...model_files.quantization import Grid, Quantization
from .grids import Granule, grid_shape

_BLOCK_BYTES = 8 * 2**20


class StoredMatrix(ABC):
    """A matrix [N, K] as files of one layout store it. `module` is the path of the module in the model."""

    def __init__(self, module: str, rows: int, columns: int, quantization: Quantization):
        self.module, self.rows, self.columns, self.quantization = module, rows, columns, quantization

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.rows, self.columns

    @property
    def data_columns(self) -> int:
        """Columns of the data."""
        return self.columns // self.quantization.format.packed

    def granule(self, grid: Grid) -> Granule:
        """Returns the rows and columns that an element of a grid describes."""
        return grid.block[0] or self.rows, grid.block[1] or self.columns

    def grid_shape(self, grid: Grid) -> tuple[int, ...]:
        """Returns the shape of a grid."""
        return grid_shape(self.size, self.granule(grid))

    @abstractmethod
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the name and shape of every tensor."""

    @abstractmethod
    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the dtypes that each tensor may have, as safetensors files name them."""

    def unused(self) -> tuple[str, ...]:
        """Returns the names of tensors of the module that files may have, and that are not loaded."""
        return ()

    @property
    def whole(self) -> str | None:
        """The tensor that holds exactly the data, if there is one."""
        return None

    def data_blocks(self) -> Iterator[Region]:
        """Yields regions of the data to read one at a time. By default, rows that begin a block of scales."""
        unit = self.granule(self.quantization.scale)[0]
        step = max(1, _BLOCK_BYTES // self.data_columns // unit) * unit
        for row in range(0, self.rows, step):
            yield (row, min(row + step, self.rows)), (0, self.data_columns)

    def data(self, files: TensorFiles, region: Region) -> np.ndarray:
        """Reads a region of the data that `data_blocks` yielded."""
        assert self.whole is not None
        return files.read(self.whole, region[0])

    @abstractmethod
    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """Reads a grid, such as the scales."""

    def open(self, files: TensorFiles) -> None:
        """Prepares the files, and checks what shapes do not tell.

        Raises:
          CheckpointError: The numbers are in an arrangement that is not implemented.
        """
        del files  # most layouts need neither


def bytes_of(words: np.ndarray) -> np.ndarray:
    """Returns the bytes [R, 4 C] of 32-bit words [R, C], lowest first."""
    return words.astype("<i4", copy=False).view(np.uint8)


def numbers_of(words: np.ndarray) -> np.ndarray:
    """Returns the 4-bit numbers [R, 8 C] of 32-bit words [R, C], from the lowest bits on."""
    return INT4.unpack(bytes_of(words))
