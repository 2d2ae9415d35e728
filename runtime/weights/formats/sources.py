"""Sources of quantized parameters: they give the parts of matrices in the granules that a sharding asks for.

Each wraps a store of tensors and is itself a `TensorSource`. Names that are no `PartName` go to the store unchanged.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from meshserve.kernels.linear.formats import DATA, Format
from meshserve.sharding.checkpoints.checkpoint import OrbaxCheckpoint
from meshserve.sharding.checkpoints.parameters import Copy, Region, TensorSource, assign, part_of, relative
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ...model_files.quantization import Grid, Quantization
from .grids import Granule, PartName, converted, regridded
from .stored_matrix import StoredMatrix


class PublishedMatrices:
    """Safetensors files of a published format.

    Args:
      files: The files, whose tensors have been checked.
      matrices: The quantized matrices by the name of the tensor that an unquantized checkpoint would have instead.
    """

    def __init__(self, files: TensorFiles, matrices: Mapping[str, StoredMatrix]):
        self._files, self._matrices = files, matrices
        for matrix in matrices.values():
            matrix.open(files)

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `TensorSource`."""
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
        """See `TensorSource`."""
        name = PartName.parse(tensor)
        if name is None:
            if tensor not in self._matrices:
                self._files.fill(tensor, block, copies)
            else:
                _scatter(self._dequantized(self._matrices[tensor], block), block, copies)
            return
        matrix = self._matrices[name.matrix]
        if name.part == DATA and matrix.whole is not None:
            self._files.fill(matrix.whole, block, copies)
        elif name.part == DATA:
            _scatter(matrix.data(self._files, block), block, copies)
        else:
            grid = next(grid for grid in matrix.quantization.grids if grid.part == name.part)
            values = regridded(self._grid(matrix, grid), matrix.size, matrix.granule(grid), name.granule)
            _scatter(values, block, copies)

    def _grid(self, matrix: StoredMatrix, grid: Grid) -> np.ndarray:
        values = matrix.grid(self._files, grid)
        return converted(values, np.dtype(grid.dtype), f"the {grid.part} of {matrix.module}")

    def _dequantized(self, matrix: StoredMatrix, region: Region) -> np.ndarray:
        """Returns a region of a matrix that is served unquantized."""
        rows, (first, last) = region
        format, grids = matrix.quantization.format, {}
        data = matrix.data(self._files, (rows, (first // format.packed, last // format.packed)))
        for grid in matrix.quantization.grids:
            row_size, column_size = matrix.granule(grid)
            places = np.arange(*rows)[:, None] // row_size, np.arange(first, last) // column_size
            grids[grid.part] = self._grid(matrix, grid)[places]
        return _elements(format, data, grids)


class StoredGrids:
    """An Orbax checkpoint with quantized weights.

    Args:
      checkpoint: The checkpoint.
      granules: Granule of each stored scale and zero point, by the array's name.
      shapes: Shape of each stored array.
    """

    def __init__(self, checkpoint: OrbaxCheckpoint, granules: Mapping[str, Granule], shapes: Mapping[str, tuple]):
        self._checkpoint, self._granules, self._shapes = checkpoint, granules, shapes

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `TensorSource`. A grid is read as a whole if it is needed in another granule."""
        array, name = self._array(tensor)
        if name is None:
            return self._checkpoint.blocks(array)
        *leading, rows, columns = self._shapes[array]
        size = rows * self._granules[array][0], columns * self._granules[array][1]
        extents = (*leading, -(-size[0] // name.granule[0]), -(-size[1] // name.granule[1]))
        return [tuple((0, extent) for extent in extents)]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `TensorSource`."""
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


class DequantizingSource:
    """Dequantizes matrices while they are read.

    Args:
      source: A source of the parts of these matrices.
      quantization: Theirs.
      matrices: Their names in the source, and the granule in which it has each of their grids; 0 means all rows or
        columns.
    """

    def __init__(self, source: TensorSource, quantization: Quantization, matrices: Mapping[str, Mapping[str, Granule]]):
        self._source, self._quantization, self._matrices = source, quantization, matrices
        self._packed = quantization.format.packed

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `TensorSource`."""
        if tensor not in self._matrices:
            return self._source.blocks(tensor)
        blocks = self._source.blocks(self._data(tensor))
        return [(*rows, (self._packed * first, self._packed * last)) for *rows, (first, last) in blocks]

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `TensorSource`."""
        if tensor not in self._matrices:
            self._source.fill(tensor, block, copies)
            return
        *leading, rows, columns = block
        data_region = (*leading, rows, (columns[0] // self._packed, columns[1] // self._packed))
        data = np.empty([stop - start for start, stop in data_region], self._quantization.format.storage)
        self._source.fill(self._data(tensor), data_region, [Copy(data_region, data)])
        grids = {grid.part: self._of_elements(tensor, grid, block) for grid in self._quantization.grids}
        _scatter(_elements(self._quantization.format, data, grids), block, copies)

    def _data(self, tensor: str) -> str:
        return str(PartName(tensor, DATA, (1, self._packed)))

    def _of_elements(self, tensor: str, grid: Grid, block: Region) -> np.ndarray:
        """Returns the number of a grid that describes each element of a region of a matrix."""
        *leading, rows, columns = block
        num_rows, num_columns = (max(extents[axis][1] for extents in self.blocks(tensor)) for axis in (-2, -1))
        row_size, column_size = self._matrices[tensor][grid.part]
        granule = row_size or num_rows, column_size or num_columns
        places = [np.arange(*extent) // size for extent, size in zip((rows, columns), granule, strict=True)]
        region = (*leading, *((int(place[0]), int(place[-1]) + 1) for place in places))
        values = np.empty([stop - start for start, stop in region], grid.dtype)
        read_into(self._source, str(PartName(tensor, grid.part, granule)), region, values)
        return values[..., (places[0] - places[0][0])[:, None], places[1] - places[1][0]]


def read_into(source: TensorSource, tensor: str, region: Region, target: np.ndarray) -> None:
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
    packed = matrix.quantization.format.packed
    return rows, (packed * first, packed * last)


def _elements(format: Format, data: np.ndarray, grids: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns matrix elements in float32 from data, and the numbers of each grid that describe each element."""
    numbers = format.unpack(data).astype(np.float32)
    return format.elements(numbers, {part: grid.astype(np.float32) for part, grid in grids.items()})
