"""How published formats store a quantised matrix: the tensors of a module, and their numbers in our arrangement.

Every format's numbers become those of `kernels.linear.QuantisedMatrix`, without loss: 8-bit floats as they are, 4-bit
integers two in a byte along the columns.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from meshserve.kernels.linear import SYMMETRIC_ZERO
from meshserve.sharding.checkpoints.parameters import CheckpointError, Region
from meshserve.sharding.checkpoints.tensor_files import FLOATS, TensorFiles

from ..api.quantisation import Quantisation
from .grids import Granule, grid_shape, packed, unpacked

_BLOCK_BYTES = 8 * 2**20
# Column of a word's 8 columns that each 4-bit field of it holds, from the lowest bits on (AutoAWQ's GEMM version).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class StoredMatrix(Protocol):
    """One module's quantised matrix [N, K] as files store it."""

    module: str
    rows: int
    columns: int
    quantisation: Quantisation

    @property
    def block(self) -> Granule:
        """Rows and columns that share a scale."""
        ...

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the name and shape of every tensor."""
        ...

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the dtypes that each tensor may have, as safetensors files name them."""
        ...

    @property
    def whole(self) -> str | None:
        """The tensor that holds exactly the data, if there is one."""
        ...

    def data_blocks(self) -> Iterator[Region]:
        """Yields regions of the data to read one at a time."""
        ...

    def data(self, files: TensorFiles, region: Region) -> np.ndarray:
        """Reads a region of the data that `data_blocks` yielded."""
        ...

    def scale(self, files: TensorFiles) -> np.ndarray:
        """Reads the scales, a grid of blocks."""
        ...

    def zero(self, files: TensorFiles) -> np.ndarray:
        """Reads the zero points, a grid of blocks."""
        ...

    def check(self, files: TensorFiles) -> None:
        """Checks what the shapes do not tell.

        Raises:
          CheckpointError: The numbers are in an arrangement that is not implemented.
        """
        ...


class Module:
    """Names and sizes that all formats share. `module` is the path of the module in the model."""

    def __init__(self, module: str, rows: int, columns: int, quantisation: Quantisation):
        self.module, self.rows, self.columns, self.quantisation = module, rows, columns, quantisation

    @property
    def block(self) -> Granule:
        """Rows and columns that share a scale."""
        rows, columns = self.quantisation.block
        return rows, columns or self.columns

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the grid of scales."""
        return grid_shape((self.rows, self.columns), self.block)

    @property
    def data_columns(self) -> int:
        """Columns of the data."""
        return self.columns // 2 if self.quantisation.is_int4 else self.columns

    def zero(self, files: TensorFiles) -> np.ndarray:
        """See `StoredMatrix`."""
        raise AssertionError("formats without zero points are not asked for them")

    def check(self, files: TensorFiles) -> None:
        """See `StoredMatrix`."""


class RowMajor(Module):
    """A tensor that holds the data as they are, and one with the scales."""

    @property
    def whole(self) -> str | None:
        """See `StoredMatrix`."""
        return f"{self.module}.{'weight_packed' if self.quantisation.is_int4 else 'weight'}"

    @property
    def _scale(self) -> str:
        return f"{self.module}.{'weight_scale_inv' if self.quantisation.method == 'fp8' else 'weight_scale'}"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        assert self.whole is not None
        if not self.quantisation.is_int4:
            return {self.whole: (self.rows, self.columns), self._scale: self.grid}
        found: dict[str, tuple[int, ...]] = {
            self.whole: (self.rows, self.columns // 8),
            self._scale: self.grid,
            f"{self.module}.weight_shape": (2,),
        }
        if self.quantisation.has_zero_points:
            found[f"{self.module}.weight_zero_point"] = (-(-self.rows // 8), self.grid[1])
        return found

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        integers = {name: ("I32", "I64") for name in self.tensors()}
        assert self.whole is not None
        return integers | {self.whole: ("I32",) if self.quantisation.is_int4 else ("F8_E4M3",), self._scale: FLOATS}

    def data_blocks(self) -> Iterator[Region]:
        """See `StoredMatrix`."""
        step = max(1, _BLOCK_BYTES // self.data_columns // self.block[0]) * self.block[0]
        for row in range(0, self.rows, step):
            yield (row, min(row + step, self.rows)), (0, self.data_columns)

    def data(self, files: TensorFiles, region: Region) -> np.ndarray:
        """See `StoredMatrix`."""
        assert self.whole is not None
        return files.read(self.whole, region[0])

    def scale(self, files: TensorFiles) -> np.ndarray:
        """See `StoredMatrix`."""
        return files.read(self._scale)

    def zero(self, files: TensorFiles) -> np.ndarray:
        """See `StoredMatrix`. They are packed along the rows."""
        words = files.read(f"{self.module}.weight_zero_point")
        return _numbers(np.ascontiguousarray(words.T)).T[: self.rows]


class ColumnMajor(Module):
    """AWQ and GPTQ: words of eight 4-bit numbers in the transposed matrix [K, N], with a zero point for each scale."""

    whole = None

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        rows, groups = self.rows, self.grid[1]
        words = (self.columns, rows // 8) if self.is_awq else (self.columns // 8, rows)
        return {
            f"{self.module}.qweight": words,
            f"{self.module}.qzeros": (groups, rows // 8),
            f"{self.module}.scales": (groups, rows),
        }

    @property
    def is_awq(self) -> bool:
        """Whether words pack rows, in AWQ's order, instead of columns."""
        return self.quantisation.method == "awq"

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return {name: FLOATS if name.endswith(".scales") else ("I32",) for name in self.tensors()}

    def data_blocks(self) -> Iterator[Region]:
        """See `StoredMatrix`."""
        step = max(1, 2 * _BLOCK_BYTES // self.rows // 8) * 8
        for column in range(0, self.columns, step):
            yield (0, self.rows), (column // 2, min(column + step, self.columns) // 2)

    def data(self, files: TensorFiles, region: Region) -> np.ndarray:
        """See `StoredMatrix`."""
        first, last = (2 * byte for byte in region[1])
        name = f"{self.module}.qweight"
        if self.is_awq:
            return packed(self._rows_in_order(files.read(name, (first, last))).T)
        words = files.read(name, (first // 8, last // 8))
        return _bytes(np.ascontiguousarray(words.T))

    def scale(self, files: TensorFiles) -> np.ndarray:
        """See `StoredMatrix`."""
        if not self.quantisation.has_zero_points and (self.zero(files) != SYMMETRIC_ZERO).any():
            raise CheckpointError(
                f"{self.module}.qzeros has zero points other than {SYMMETRIC_ZERO}, but quantization_config.sym of "
                "config.json is true. Set it to false."
            )
        return files.read(f"{self.module}.scales").T

    def zero(self, files: TensorFiles) -> np.ndarray:
        """See `StoredMatrix`."""
        words = files.read(f"{self.module}.qzeros")
        numbers = self._rows_in_order(words) if self.is_awq else _numbers(words)
        return (numbers.T + np.uint8(self.quantisation.zero_point_offset)) & np.uint8(15)

    def check(self, files: TensorFiles) -> None:
        """See `StoredMatrix`. GPTQ's `g_idx` may only say what is so without it."""
        name = f"{self.module}.g_idx"
        if name not in files:
            return
        found = files.read(name)
        if not np.array_equal(found, np.arange(self.columns) // self.block[1]):
            raise CheckpointError(
                f"{name} orders columns by activation (quantization_config.desc_act); allowed is the natural order "
                "only. Use a checkpoint that was quantised with desc_act false."
            )

    def _rows_in_order(self, words: np.ndarray) -> np.ndarray:
        """Returns the numbers [R, 8 C] of AWQ's words [R, C]."""
        fields = _numbers(words).reshape(*words.shape, 8)
        numbers = np.empty_like(fields)
        numbers[..., AWQ_ORDER] = fields
        return numbers.reshape(words.shape[0], -1)


def stored_matrix(module: str, rows: int, columns: int, quantisation: Quantisation) -> StoredMatrix:
    """Returns how a module's matrix is stored in files of the quantisation's method."""
    kind = ColumnMajor if quantisation.method in ("awq", "gptq") else RowMajor
    return kind(module, rows, columns, quantisation)


def _bytes(words: np.ndarray) -> np.ndarray:
    """Returns the bytes [R, 4 C] of 32-bit words [R, C], lowest first."""
    return words.astype("<i4", copy=False).view(np.uint8)


def _numbers(words: np.ndarray) -> np.ndarray:
    """Returns the 4-bit numbers [R, 8 C] of 32-bit words [R, C], from the lowest bits on."""
    return unpacked(_bytes(words))
