"""Sources of quantised parameters: they give the parts of matrices in the granules that a sharding asks for.

Each wraps a store of tensors and is itself a `Source`. Names that are no `PartName` go to the store unchanged.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from meshserve.kernels.linear import FP8
from meshserve.sharding.checkpoints.checkpoint import OrbaxCheckpoint
from meshserve.sharding.checkpoints.parameters import Copy, Region, Source, assign, part_of, relative
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ..api.quantisation import Quantisation
from .grids import DATA, SCALE, ZERO, Granule, PartName, converted, dequantised, regridded
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


class DequantisingSource:
    """Dequantises matrices while they are read.

    Args:
      source: A source of the parts of these matrices.
      quantisation: Theirs.
      matrices: Their names in the source, and the granule in which it has their scales; 0 columns are all.
    """

    def __init__(self, source: Source, quantisation: Quantisation, matrices: Mapping[str, Granule]):
        self._source, self._quantisation, self._matrices = source, quantisation, matrices
        self._per_byte = 2 if quantisation.is_int4 else 1

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `Source`."""
        if tensor not in self._matrices:
            return self._source.blocks(tensor)
        blocks = self._source.blocks(self._data(tensor))
        return [(*rows, (self._per_byte * first, self._per_byte * last)) for *rows, (first, last) in blocks]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `Source`."""
        if tensor not in self._matrices:
            self._source.fill(tensor, block, copies)
            return
        *leading, rows, columns = block
        data_region = (*leading, rows, (columns[0] // self._per_byte, columns[1] // self._per_byte))
        data = np.empty([stop - start for start, stop in data_region], self._data_dtype)
        self._source.fill(self._data(tensor), data_region, [Copy(data_region, data)])
        scale = self._of_elements(tensor, SCALE, np.dtype(self._quantisation.scale_dtype), block)
        zero = (
            self._of_elements(tensor, ZERO, np.dtype(np.uint8), block) if self._quantisation.has_zero_points else None
        )
        _scatter(dequantised(data, scale, zero), block, copies)

    @property
    def _data_dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self._quantisation.is_int4 else np.dtype(FP8)

    def _data(self, tensor: str) -> str:
        return str(PartName(tensor, DATA, (1, self._per_byte)))

    def _of_elements(self, tensor: str, part: str, dtype: np.dtype, block: Region) -> np.ndarray:
        """Returns the scale or zero point of each element of a region of a matrix."""
        *leading, rows, columns = block
        granule = self._matrices[tensor]
        granule = granule[0], granule[1] or max(extents[-1][1] for extents in self.blocks(tensor))
        places = [np.arange(*extent) // size for extent, size in zip((rows, columns), granule, strict=True)]
        region = (*leading, *((int(place[0]), int(place[-1]) + 1) for place in places))
        grid = np.empty([stop - start for start, stop in region], dtype)
        read_into(self._source, str(PartName(tensor, part, granule)), region, grid)
        return grid[..., (places[0] - places[0][0])[:, None], places[1] - places[1][0]]


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
