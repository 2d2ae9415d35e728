"""Sources of quantised parameters: they give the parts of matrices in the granules that a sharding asks for.

Each wraps a store of tensors and is itself a `Source`. Names that are no `PartName` go to the store unchanged.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from meshserve.sharding.checkpoints.checkpoint import OrbaxCheckpoint
from meshserve.sharding.checkpoints.parameters import Copy, Region, Source, assign, part_of, relative
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from .grids import DATA, SCALE, Granule, PartName, converted, dequantised, regridded
from .published import StoredMatrix


class PublishedMatrices:
    """Safetensors files of a published format.

    Args:
      files: The files, whose tensors have been checked.
      matrices: The quantised matrices by the name of the tensor that an unquantised checkpoint would have instead.
      scale_dtype: Dtype of the scales on the devices.
    """

    def __init__(self, files: TensorFiles, matrices: Mapping[str, StoredMatrix], scale_dtype: str):
        self._files, self._matrices, self._scale_dtype = files, matrices, np.dtype(scale_dtype)
        for matrix in matrices.values():
            matrix.check(files)
            if matrix.quantisation.is_int4 and matrix.whole is not None:
                files.view_as_bytes(matrix.whole)

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `Source`."""
        name = PartName.parse(tensor)
        if name is None:
            if tensor not in self._matrices:
                return self._files.blocks(tensor)
            return [_of_matrix(block, self._matrices[tensor]) for block in self._matrices[tensor].data_blocks()]
        matrix = self._matrices[name.matrix]
        if name.part == DATA:
            return self._files.blocks(matrix.whole) if matrix.whole is not None else list(matrix.data_blocks())
        rows, columns = name.granule
        return [((0, -(-matrix.rows // rows)), (0, -(-matrix.columns // columns)))]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `Source`."""
        name = PartName.parse(tensor)
        if name is None:
            if tensor not in self._matrices:
                self._files.fill(tensor, block, copies)
            else:
                _scatter(self._dequantised(self._matrices[tensor], block), block, copies)
            return
        matrix = self._matrices[name.matrix]
        if name.part == DATA and matrix.whole is not None:
            self._files.fill(matrix.whole, block, copies)
        elif name.part == DATA:
            _scatter(matrix.data(self._files, block), block, copies)
        else:
            grid = self._scale(matrix) if name.part == SCALE else matrix.zero(self._files)
            size = matrix.rows, matrix.columns
            _scatter(regridded(grid, size, matrix.block, name.granule), block, copies)

    def _scale(self, matrix: StoredMatrix) -> np.ndarray:
        return converted(matrix.scale(self._files), self._scale_dtype, f"the scale of {matrix.module}")

    def _dequantised(self, matrix: StoredMatrix, region: Region) -> np.ndarray:
        """Returns a region of a matrix that is served unquantised."""
        per_byte = 2 if matrix.quantisation.is_int4 else 1
        rows, (first, last) = region
        data = matrix.data(self._files, (rows, (first // per_byte, last // per_byte)))
        row_index = np.arange(*rows)[:, None] // matrix.block[0]
        column_index = np.arange(first, last) // matrix.block[1]
        scale, zero = self._scale(matrix), None
        if matrix.quantisation.has_zero_points:
            zero = matrix.zero(self._files)[row_index, column_index]
        return dequantised(data, scale[row_index, column_index], zero)


class StoredGrids:
    """An Orbax checkpoint with quantised weights.

    Args:
      checkpoint: The checkpoint.
      granules: Granule of each stored scale and zero point, by the array's name.
      shapes: Shape of each stored array.
    """

    def __init__(self, checkpoint: OrbaxCheckpoint, granules: Mapping[str, Granule], shapes: Mapping[str, tuple]):
        self._checkpoint, self._granules, self._shapes = checkpoint, granules, shapes

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `Source`. A grid is read as a whole if it is needed in another granule."""
        array, name = self._array(tensor)
        if name is None:
            return self._checkpoint.blocks(array)
        *leading, rows, columns = self._shapes[array]
        size = rows * self._granules[array][0], columns * self._granules[array][1]
        extents = (*leading, -(-size[0] // name.granule[0]), -(-size[1] // name.granule[1]))
        return [tuple((0, extent) for extent in extents)]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `Source`."""
        array, name = self._array(tensor)
        if name is None:
            self._checkpoint.fill(array, block, copies)
            return
        shape, old = self._shapes[array], self._granules[array]
        grid = np.empty(shape, copies[0].target.dtype)
        read_into(self._checkpoint, array, tuple((0, extent) for extent in shape), grid)
        _scatter(regridded(grid, (shape[-2] * old[0], shape[-1] * old[1]), old, name.granule), block, copies)

    def _array(self, tensor: str) -> tuple[str, PartName | None]:
        """Returns the stored array, and what is asked of it if that is not the array as it is."""
        name = PartName.parse(tensor)
        if name is None:
            return tensor, None
        array = f"{name.matrix}.{name.part}"
        return array, None if self._granules[array] == name.granule else name


def read_into(source: Source, tensor: str, region: Region, target: np.ndarray) -> None:
    """Reads a region of a tensor of any source."""
    if isinstance(source, TensorFiles):  # it reads any rows, not just whole blocks
        whole = [(0, last) for _, last in source.blocks(tensor)[-1]]
        source.fill(tensor, (region[0], *whole[1:]), [Copy(region, target)])
        return
    for block in source.blocks(tensor):
        if (part := part_of(Copy(region, target), block)) is not None:
            source.fill(tensor, block, [part])


def _scatter(values: np.ndarray, block: Region, copies: Sequence[Copy]) -> None:
    for copy in copies:
        assign(copy.target, values[relative(copy.region, block)])


def _of_matrix(block: Region, matrix: StoredMatrix) -> Region:
    """Returns the region of a matrix that a region of its data holds."""
    rows, (first, last) = block
    per_byte = 2 if matrix.quantisation.is_int4 else 1
    return rows, (per_byte * first, per_byte * last)
