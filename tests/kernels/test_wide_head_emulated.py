"""Tests wide_head.cuh compiled for the host, where a copy is finished when it is issued."""

import ctypes

import numpy as np
import pytest

from meshserve.kernels.linear import FP8, cases

from . import on_host
from .comparing import assert_has_values
from .test_quantized_emulated import SCALE_TYPES, Scales

pytestmark = on_host.needs_compiler
MOST_TOKENS, TILE_ROWS = 128, 192


class Args(ctypes.Structure):
    """Mirrors the struct in wide_head.cuh."""

    _fields_ = [
        ("input_scales", ctypes.c_void_p),
        ("scales", Scales),
        *((name, ctypes.c_int) for name in ("rows", "tiles", "num_tokens", "blocks")),
        ("out", ctypes.c_void_p),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "wide_head.cpp")


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns e4m3 numbers [blocks, 2, T, 128] of tokens [T, columns], and the powers of two [blocks, 128]."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 128)
    power = np.exp2(np.floor(np.log2(np.abs(blocks).max(axis=-1))) - 7).astype(np.float32)
    blocks = blocks / power[..., None]
    first = blocks.astype(FP8)
    second = (blocks - first.astype(np.float32)).astype(FP8)
    numbers = np.ascontiguousarray(np.stack([first, second]).transpose(2, 0, 1, 3))
    padding = ((0, 0), (0, MOST_TOKENS - len(x)))  # what no token has must not matter
    return numbers, np.ascontiguousarray(np.pad(power.T, padding, constant_values=np.nan))


@pytest.mark.parametrize(
    ("rows", "tokens", "columns", "grid", "scale_dtype"),
    [
        pytest.param(384, 128, 768, 2, "float32", id="a-tile-each"),
        pytest.param(400, 65, 1024, 2, "bfloat16", id="two-tiles-and-a-part-of-one-beyond-the-matrix"),
        pytest.param(1168, 100, 256, 4, "float32", id="one-and-two-tiles-of-few-columns"),
    ],
)
def test_logits_keep_the_precision_of_activations(library, rows, tokens, columns, grid, scale_dtype):
    case = cases.Case(
        name="", kind="fp8", block=(1, columns), rows=rows, columns=columns, tokens=tokens, dtype="bfloat16",
        scale_dtype=scale_dtype,
    )  # fmt: skip
    inputs = cases.make_inputs(case, seed=3)
    numbers, powers = split(np.asarray(inputs.x))
    data, scales = np.ascontiguousarray(inputs.weight.data), np.ascontiguousarray(inputs.weight.scale)
    out = np.zeros((tokens, rows), np.float32)
    of_weights = Scales(
        values=scales.ctypes.data, type=SCALE_TYPES[scale_dtype], rows_each=1, columns_log2=31, grid_rows=rows,
        grid_columns=1,
    )  # fmt: skip
    args = Args(
        input_scales=powers.ctypes.data, scales=of_weights, rows=rows, tiles=-(-rows // TILE_ROWS),
        num_tokens=tokens, blocks=columns // 128, out=out.ctypes.data,
    )  # fmt: skip
    library.multiply(grid, *(ctypes.c_void_p(array.ctypes.data) for array in (data, numbers)), ctypes.byref(args))
    expected = cases.expected(inputs)
    assert_has_values(expected)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-4
