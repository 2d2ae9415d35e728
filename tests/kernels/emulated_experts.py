"""What the tests of the experts' CUDA kernels share: weights, structs of the kernels, and the kernels compiled for the
host.

A copy of the copy engine is finished when it is issued, but what a block sends to another of its cluster arrives when
that one waits for it. A misaligned access ends the process.
"""

import ctypes
import math
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from . import on_host

NORM = (("norm_tiles", ctypes.c_int), ("inverse_dim", ctypes.c_float), ("epsilon", ctypes.c_float))


class Scales(ctypes.Structure):
    """Mirrors the struct in weight_formats.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "zero")),
        *((name, ctypes.c_int) for name in ("type", "rows_each", "columns_log2", "grid_rows", "grid_columns")),
    ]


class GatherArgs(ctypes.Structure):
    """Mirrors the struct in router.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "slots", "rows", "scales")),
        ("stride", ctypes.c_int),
        ("sums", ctypes.c_void_p),
        *NORM,
        *((name, ctypes.c_int) for name in ("num_tokens", "num_chosen", "columns", "token_warps")),
        ("is_ordered", ctypes.c_bool),
    ]


class Stack(NamedTuple):
    """The matrices of all layers and experts [..., rows, columns]: bfloat16, or e4m3 with a scale for each block."""

    data: np.ndarray
    scale: np.ndarray | None

    @property
    def values(self) -> np.ndarray:
        """The numbers in float32."""
        values = self.data.astype(np.float32)
        if self.scale is None:
            return values
        return (blocks(values, self.scale) * self.scale.astype(np.float32)[..., None, :, None]).reshape(values.shape)

    @property
    def scales(self) -> Scales:
        if self.scale is None:
            return Scales()
        grid_columns = self.scale.shape[-1]
        columns = self.data.shape[-1] // grid_columns
        rows = self.data.shape[-2] // self.scale.shape[-2]
        grid_rows = self.scale.size // grid_columns
        kind = SCALE_TYPES.index(self.scale.dtype)
        return Scales(self.scale.ctypes.data, None, kind, rows, int(math.log2(columns)), grid_rows, grid_columns)


SCALE_TYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


def blocks(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns [..., rows, columns] as [..., R, rows / R, C, columns / C] for scales [..., R, C]."""
    *leading, rows, columns = values.shape
    num_rows, num_columns = scale.shape[-2:]
    return values.reshape(*leading, num_rows, rows // num_rows, num_columns, columns // num_columns)


def stack(values: np.ndarray, is_fp8: bool, scale_type: np.dtype = SCALE_TYPES[0]) -> Stack:
    if not is_fp8:
        return Stack(values.astype(ml_dtypes.bfloat16), None)
    *leading, rows, columns = values.shape
    block = math.gcd(128, rows), math.gcd(128, columns)
    rng = np.random.default_rng(7)
    scale = np.exp2(rng.uniform(-2, 2, (*leading, rows // block[0], columns // block[1]))).astype(scale_type)
    numbers = blocks(values, scale) / scale.astype(np.float32)[..., None, :, None]
    return Stack(numbers.reshape(values.shape).astype(ml_dtypes.float8_e4m3fn), scale)


def ordered(x: np.ndarray) -> np.ndarray:
    """Returns activations with their columns in the order of weight_formats.cuh, for 8-bit weights."""
    column = np.arange(x.shape[-1])
    result = np.empty_like(x)
    result[..., column // 16 * 16 + column % 2 * 8 + column % 16 // 4 * 2 + column % 4 // 2] = x
    return result


class TensorMap(ctypes.Structure):
    """Mirrors the struct in emulated/ptx.cuh."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int * 3),
        ("box", ctypes.c_int * 3),
        ("element_bytes", ctypes.c_int),
    ]


def tensor_map(array: np.ndarray, sizes: tuple[int, int, int], rows: int) -> TensorMap:
    columns = 128 // array.itemsize
    return TensorMap(array.ctypes.data, sizes, (columns, rows, 1), array.itemsize)


def compiled(folder: Path) -> ctypes.CDLL:
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    of_clusters = (("router", "RouterMemory", "shared_rows"), ("wide_tiles", "TilesMemory", "shared"))
    memory = "*reinterpret_cast<{}*>({})"
    replaced = [
        (f"experts/sm90/{file}.cuh", memory.format(kind, name), memory.format(kind, f"of_block({name})"))
        for file, kind, name in of_clusters
    ]
    return on_host.compiled(folder, "experts.cpp", replaced=replaced, flags=flags)


def rounded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns activations as e4m3 numbers, and their scales [columns / 128, tokens]."""
    parts = values.astype(np.float32).reshape(len(values), -1, 128)
    largest = np.abs(parts).max(axis=2)
    scales = np.where(largest > 0, largest / np.float32(448), np.float32(1)).astype(np.float32)
    numbers = (parts / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return numbers.reshape(values.shape), np.ascontiguousarray(scales.T)
