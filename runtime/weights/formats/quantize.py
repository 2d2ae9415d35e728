"""Quantizes weights on the host, while they are loaded or converted (`--quantize`)."""

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from meshserve.kernels.linear.formats import (
    DATA,
    E4M3,
    FP4,
    FP4_MAX,
    FP8,
    FP8_MAX,
    INT4,
    MXFP4,
    NVFP4,
    SCALE,
    SYMMETRIC_ZERO,
    TENSOR_SCALE,
    Format,
)
from meshserve.kernels.linear.formats.fp4 import EXPONENT_BIAS
from meshserve.sharding.checkpoints.parameters import Copy, Region, TensorSource, assign, relative

from ...model_files.quantization import Grid, Quantization
from . import compressed_tensors, mxfp4, nvfp4, official_fp8
from .grids import Granule, PartName, grid_shape, regridded
from .sources import read_into

_BLOCK_VALUES = 2 * 2**20  # read and quantized at a time, in float32
_INT4_MAX = 7
# Largest element of a group over the largest number, tried for the least squared error of the group.
_SHRINKINGS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_GROUPS: Mapping[str, Sequence[int]] = {"int4": (128, 64, 32), "nvfp4": (nvfp4.GROUP,), "mxfp4": (mxfp4.GROUP,)}
_LEAST_E4M3 = 2.0**-9  # the smallest positive number


class Quantized(NamedTuple):
    """A quantized region of a matrix, symmetric."""

    data: np.ndarray  # [N, K / format.packed]
    scale: np.ndarray  # a grid of blocks


def made_quantization(scheme: str, columns: Sequence[int], dtype: str) -> Quantization:
    """Returns the quantization that `--quantize` makes.

    Args:
      scheme: One of `SCHEMES`.
      columns: Numbers of columns of the model's projections. A group of 4-bit numbers has 128 columns, or 64 or 32 if
        these numbers are no multiples of it; one of NVFP4 has 16, of MXFP4 32.
      dtype: The model's dtype, which is that of the scales of 4-bit numbers.

    Raises:
      ValueError: A number of columns is no multiple of a group's.
    """
    made = partial(Quantization, layout=None, skipped=("lm_head",))
    if scheme == "fp8-block":
        return made(format=E4M3, grids=(Grid(SCALE, "float32", (128, 128)),))
    if scheme == "fp8-channel":
        return made(format=E4M3, grids=(Grid(SCALE, "float32", (1, 0)),))
    groups = _GROUPS[scheme]
    group = next((size for size in groups if all(number % size == 0 for number in columns)), 0)
    if not group:
        raise ValueError(
            f"{scheme} needs projections whose inputs are multiples of {groups[-1]}; this model has "
            f"{', '.join(map(str, columns))}. Use fp8-block or fp8-channel."
        )
    if scheme == "nvfp4":
        return dataclasses.replace(nvfp4.quantization(None), skipped=("lm_head",))
    if scheme == "mxfp4":
        return dataclasses.replace(mxfp4.quantization(None), skipped=("lm_head",))
    return made(format=INT4, grids=(Grid(SCALE, dtype, (1, group), has_model_dtype=True),))


def head_quantization() -> Quantization:
    """Returns the quantization that `--fp8-head` makes: 8-bit floats with a scale for each token of the vocabulary."""
    return dataclasses.replace(made_quantization("fp8-channel", (), ""), parameters=frozenset({"head"}))


def published_form(quantization: Quantization) -> dict[str, Any]:
    """Returns the `quantization_config` that describes a made quantization in a published format."""
    is_official = quantization.format == E4M3 and quantization.scale.block == (128, 128)
    return (official_fp8 if is_official else compressed_tensors).written(quantization)


def quantized(values: np.ndarray, quantization: Quantization, of_tensor: np.float32 | None = None) -> Quantized:
    """Quantizes a matrix [N, K] of float32, whose first row begins a block.

    Args:
      values: The matrix, or some of its rows.
      quantization: What to make.
      of_tensor: See `tensor_scale`; that of `values` if it is left out. Other formats have no use for it.
    """
    if quantization.format == NVFP4:
        return _quantized_nvfp4(values, quantization.scale, tensor_scale(values) if of_tensor is None else of_tensor)
    return _QUANTIZERS[quantization.format](values, quantization.scale)


def tensor_scale(values: np.ndarray) -> np.float32:
    """Returns the scale of a whole matrix in NVFP4, with which the largest of a group is the largest e4m3 number."""
    highest = np.abs(values).max(initial=0.0)
    return np.float32(highest / np.float32(FP4_MAX * FP8_MAX)) if highest > 0 else np.float32(1)


def _quantized_e4m3(values: np.ndarray, scales: Grid) -> Quantized:
    """Chooses scales so that the largest element of a block becomes the largest number."""
    rows, columns = scales.block[0], scales.block[1] or values.shape[1]
    padding = [(0, -length % step) for length, step in zip(values.shape, (rows, columns), strict=True)]
    padded = np.pad(values, padding)
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    highest = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    scale = np.where(highest > 0, highest / np.float32(FP8_MAX), np.float32(1)).astype(np.float32)
    data = np.clip(blocks / scale, -FP8_MAX, FP8_MAX).astype(FP8).reshape(padded.shape)
    return Quantized(data[: values.shape[0], : values.shape[1]], scale[:, 0, :, 0])


def _quantized_int4(values: np.ndarray, scales: Grid) -> Quantized:
    """Chooses each group's scale among a few for the least squared error."""
    groups, dtype = values.reshape(values.shape[0], -1, scales.block[1]), np.dtype(scales.dtype)
    highest = np.abs(groups).max(axis=-1, keepdims=True)
    best_error = np.full(highest.shape, np.inf, np.float32)
    scale, numbers = np.ones(highest.shape, dtype), np.zeros(groups.shape, np.int8)
    for factor in _SHRINKINGS:
        tried = np.where(highest > 0, highest * np.float32(factor / _INT4_MAX), np.float32(1)).astype(dtype)
        wide = tried.astype(np.float32)
        rounded = np.clip(np.rint(groups / wide), -SYMMETRIC_ZERO, _INT4_MAX)
        error = np.square(rounded * wide - groups).sum(axis=-1, keepdims=True)
        is_better = error < best_error
        best_error = np.where(is_better, error, best_error)
        scale = np.where(is_better, tried, scale)
        numbers = np.where(is_better, rounded.astype(np.int8), numbers)
    unsigned = (numbers + SYMMETRIC_ZERO).astype(np.uint8).reshape(values.shape)
    return Quantized(INT4.pack(unsigned), scale[..., 0])


def _quantized_nvfp4(values: np.ndarray, scales: Grid, of_tensor: np.float32) -> Quantized:
    """Chooses scales so that the largest element of a group becomes the largest number, as near as e4m3 has them."""
    groups = values.reshape(values.shape[0], -1, scales.block[1])
    highest = np.abs(groups).max(axis=-1, keepdims=True)
    wanted = np.where(highest > 0, highest / (np.float32(FP4_MAX) * of_tensor), np.float32(1))
    scale = np.clip(wanted, _LEAST_E4M3, FP8_MAX).astype(FP8)
    numbers = _to_fp4(groups / (scale.astype(np.float32) * of_tensor))
    return Quantized(NVFP4.pack(numbers.reshape(values.shape)), scale[..., 0])


def _quantized_mxfp4(values: np.ndarray, scales: Grid) -> Quantized:
    """Chooses of two powers of two for each group that of the least squared error: without clipping, or half of it."""
    groups = values.reshape(values.shape[0], -1, scales.block[1])
    highest = np.abs(groups).max(axis=-1, keepdims=True)
    fraction, exponent = np.frexp(highest / np.float32(FP4_MAX))
    exponent = np.where(highest > 0, exponent - (fraction == 0.5), 0)  # 2^exponent is not below the quotient
    best = None
    for lower in (0, 1):
        tried = np.clip(exponent - lower, 1 - EXPONENT_BIAS, EXPONENT_BIAS)
        scale = np.ldexp(np.float32(1), tried)
        numbers = _to_fp4(groups / scale)
        error = np.square(numbers * scale - groups).sum(axis=-1, keepdims=True)
        if best is None:
            best = error, tried, numbers
            continue
        is_better = error < best[0]
        best = error, np.where(is_better, tried, best[1]), np.where(is_better, numbers, best[2])
    assert best is not None
    _, exponent, numbers = best
    biased = (exponent + EXPONENT_BIAS).astype(np.uint8)
    return Quantized(MXFP4.pack(numbers.reshape(values.shape)), biased[..., 0])


def _to_fp4(values: np.ndarray) -> np.ndarray:
    """Rounds to e2m1, to even in ties; larger values become the largest number. The result is float32."""
    return np.clip(values, -FP4_MAX, FP4_MAX).astype(FP4).astype(np.float32)


_QUANTIZERS: Mapping[Format, Callable[[np.ndarray, Grid], Quantized]] = {
    E4M3: _quantized_e4m3,
    INT4: _quantized_int4,
    MXFP4: _quantized_mxfp4,
}


class QuantizingSource:
    """Quantizes matrices of a store of unquantized weights while they are read.

    Matrices are read twice, once for the numbers and once for the scales; in NVFP4 a third time, for the scale of all.

    Args:
      source: The store.
      quantization: What to make.
      only: The matrices that are made here; the store gives parts of all others. None means that all are.
    """

    def __init__(self, source: TensorSource, quantization: Quantization, only: Collection[str] | None = None):
        self._source, self._quantization, self._only = source, quantization, only
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tensor_scales: dict[tuple[str, Region], np.float32] = {}
        self._lock = threading.Lock()

    def blocks(self, tensor: str) -> Sequence[Region]:
        """See `TensorSource`. Each block begins at a row that begins a block of scales."""
        name = self._made(tensor)
        if name is None:
            return self._source.blocks(tensor)
        *leading, rows, columns = self._shape(name.matrix)
        unit = self._quantization.scale.block[0]
        step = rows if name.part == TENSOR_SCALE else max(1, _BLOCK_VALUES // columns // unit) * unit
        found = []
        for place in np.ndindex(*leading):
            first = tuple((index, index + 1) for index in place)
            for row in range(0, rows, step):
                found.append((*first, *self._extents(name, (row, min(row + step, rows)), columns)))
        return found

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """See `TensorSource`."""
        name = self._made(tensor)
        if name is None:
            self._source.fill(tensor, block, copies)
            return
        *leading, (first, last), _ = block
        *_, num_rows, columns = self._shape(name.matrix)
        of_tensor = self._tensor_scale(name.matrix, tuple(leading)) if self._quantization.format == NVFP4 else None
        if name.part == TENSOR_SCALE:
            for copy in copies:
                copy.target[...] = of_tensor
            return
        if name.part != DATA:
            first, last = first * name.granule[0], min(last * name.granule[0], num_rows)
        region = (*leading, (first, last), (0, columns))
        values = np.empty([stop - start for start, stop in region], np.float32)
        read_into(self._source, name.matrix, region, values)
        found = quantized(values.reshape(-1, columns), self._quantization, of_tensor)
        part = found.data if name.part == DATA else self._in_granule(found.scale, (last - first, columns), name.granule)
        part = part.reshape((1,) * len(leading) + part.shape)
        for copy in copies:
            assign(copy.target, part[relative(copy.region, block)])

    def _tensor_scale(self, tensor: str, leading: Region) -> np.float32:
        """Returns the `tensor_scale` of the matrix at one place of a tensor's leading dimensions."""
        with self._lock:
            if (found := self._tensor_scales.get((tensor, leading))) is not None:
                return found
        *_, rows, columns = self._shape(tensor)
        step, highest = max(1, _BLOCK_VALUES // columns), np.float32(0)
        for row in range(0, rows, step):
            region = (*leading, (row, min(row + step, rows)), (0, columns))
            values = np.empty([stop - start for start, stop in region], np.float32)
            read_into(self._source, tensor, region, values)
            highest = max(highest, np.abs(values).max())
        with self._lock:
            return self._tensor_scales.setdefault((tensor, leading), tensor_scale(np.asarray(highest)))

    def _made(self, tensor: str) -> PartName | None:
        """Returns the name of a part that is made here; None for what the store gives."""
        name = PartName.parse(tensor)
        is_made_here = name is not None and (self._only is None or name.matrix in self._only)
        return name if is_made_here else None

    def _in_granule(self, scale: np.ndarray, size: tuple[int, int], granule: Granule) -> np.ndarray:
        rows, columns = self._quantization.scale.block
        return regridded(scale, size, (rows, columns or size[1]), granule)

    def _extents(self, name: PartName, rows: tuple[int, int], columns: int) -> Region:
        """Returns the region of a part that some rows of the matrix give."""
        first, last = rows
        if name.part == DATA:
            return rows, (0, columns // name.granule[1])
        num_rows, num_columns = grid_shape((last - first, columns), name.granule)
        start = first // name.granule[0]
        return (start, start + num_rows), (0, num_columns)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        with self._lock:
            if tensor not in self._shapes:
                stops = [[stop for _, stop in block] for block in self._source.blocks(tensor)]
                self._shapes[tensor] = tuple(max(axis) for axis in zip(*stops, strict=True))
            return self._shapes[tensor]
