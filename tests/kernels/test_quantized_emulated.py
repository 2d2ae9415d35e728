"""Tests converted_product.cuh, split_product.cuh and integer_product.cuh compiled for the host: products with
quantized weights as the kernels compute them, without the asynchrony of the tensor cores.
"""

import ctypes
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.linear import FP8, QuantizedMatrix, cases
from meshserve.kernels.linear.formats import SCALE

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler
FORMS = ("split", "converted", "int4", "integer", "single")  # how a product is computed
SCALE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


class Scales(ctypes.Structure):
    """Mirrors the struct in weight_formats.cuh."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("values", "zero")]
        + [(name, ctypes.c_int) for name in ("type", "rows_each", "columns_log2", "grid_rows", "grid_columns")]
    )  # fmt: skip


class Problem(ctypes.Structure):
    """Mirrors the struct in product.cpp."""

    _fields_ = (
        [(name, ctypes.c_int) for name in ("tokens", "columns", "row", "first_block", "num_blocks")]
        + [(name, ctypes.c_void_p) for name in ("data", "input")]
        + [("scales", Scales)]
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "product.cpp", stand_ins="emulated_product")


def test_e4m3_is_converted_exactly(library):
    found = np.zeros(256, np.float32)
    library.convert(found.ctypes.data_as(ctypes.c_void_p))
    expected = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
    is_number = ~np.isnan(expected)
    assert_has_values(expected[is_number])
    np.testing.assert_array_equal(found[is_number], expected[is_number])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_two_e4m3_numbers_are_a_bfloat16():
    """What activations become, in ml_dtypes' arithmetic: exact from a 1,024th of the largest of 64 columns on."""
    values = np.arange(0x3E80, 0x4380, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)  # 0.25 to 256
    first = values.astype(FP8).astype(np.float32)
    second = (values - first).astype(FP8).astype(np.float32)
    assert_has_values(values)
    np.testing.assert_array_equal(first + second, values)


def scales_of(scale: np.ndarray, zero: np.ndarray | None, rows: int, columns: int) -> Scales:
    """Returns the scales [grid rows, grid columns] of a matrix [rows, columns]. The arrays must outlive it."""
    grid_rows, grid_columns = scale.shape
    return Scales(
        values=scale.ctypes.data,
        zero=None if zero is None else zero.ctypes.data,
        type=SCALE_TYPES[scale.dtype.name],
        rows_each=rows // grid_rows,
        columns_log2=31 if grid_columns == 1 else int(np.log2(columns // grid_columns)),
        grid_rows=grid_rows,
        grid_columns=grid_columns,
    )


def product(
    library, form: str, n: int, matrix: QuantizedMatrix, x: np.ndarray, *, row: int, blocks: range
) -> np.ndarray:
    """Returns rows `row` to `row` + 63 of the product with x [T, K], summed over some blocks of columns."""
    rows, columns = matrix.shape
    data, scale = np.ascontiguousarray(matrix.data), np.ascontiguousarray(matrix.scale)
    zero = None if matrix.zero is None else np.ascontiguousarray(matrix.zero)
    scales = scales_of(scale, zero, rows, columns)
    x, out = np.ascontiguousarray(x, np.float32), np.full((64, n), np.nan, np.float32)
    problem = Problem(len(x), columns, row, blocks.start, len(blocks), data.ctypes.data, x.ctypes.data, scales)
    library.multiply(FORMS.index(form), n, ctypes.byref(problem), out.ctypes.data_as(ctypes.c_void_p))
    return out[:, : len(x)].T


PRODUCTS = [
    ("split", "fp8", (128, 128), 384, "float32"),
    ("split", "fp8", (64, 64), 320, "bfloat16"),  # as a shard has it; the last block exceeds the columns
    ("split", "fp8", (1, 256), 256, "float32"),
    ("split", "fp8", (1, 128), 256, "float16"),
    ("converted", "fp8", (128, 128), 384, "float32"),
    ("converted", "fp8", (64, 64), 320, "bfloat16"),
    ("converted", "fp8", (1, 256), 256, "float32"),
    ("int4", "int4", (1, 32), 512, "bfloat16"),
    ("int4", "int4-zero", (1, 64), 320, "float16"),
    ("int4", "int4-zero", (1, 128), 1024, "bfloat16"),
    ("integer", "int4", (1, 128), 512, "bfloat16"),
    ("integer", "int4", (1, 32), 512, "bfloat16"),
    ("integer", "int4-zero", (1, 64), 320, "float16"),
    ("integer", "int4-zero", (1, 32), 320, "bfloat16"),
]


@pytest.mark.parametrize(
    ("n", "form", "kind", "block", "columns", "scale_dtype"),
    [(n, *product) for n in (8, 16, 32, 64) for product in PRODUCTS if product[0] != "integer" or n == 8],
    ids=str,
)
def test_product_is_that_of_exactly_dequantized_weights(library, n, form, kind, block, columns, scale_dtype):
    case = cases.Case(name="", kind=kind, block=block, rows=256, columns=columns, tokens=n - 3, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=1)
    grids = {**inputs.weight.grids, SCALE: inputs.weight.scale.astype(jnp.dtype(scale_dtype))}
    matrix = dataclasses.replace(inputs.weight, grids=grids)
    x = np.asarray(inputs.x).astype(np.float64)
    step = 128 * matrix.format.packed
    num_blocks = -(-columns // step)
    for row, blocks in ((0, range(num_blocks)), (128, range(num_blocks // 2, num_blocks))):
        begin, end = blocks.start * step, blocks.stop * step
        exact = cases.exact_matrix(matrix)[row : row + 64, begin:end]
        expected = x[:, begin:end] @ exact.T
        found = product(library, form, n, matrix, x, row=row, blocks=blocks)
        bound = 1e-5 * (np.abs(x[:, begin:end]) @ np.abs(exact).T)
        assert (np.abs(found - expected) <= bound).all()


@pytest.mark.parametrize("n", [32, 64])
@pytest.mark.parametrize(("block", "columns"), [((128, 128), 384), ((64, 64), 256), ((1, 256), 256)])
def test_activations_of_one_number_have_the_bits_of_e4m3(library, n, block, columns):
    case = cases.Case(name="", kind="fp8", block=block, rows=128, columns=columns, tokens=n - 3, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=1)
    x = np.asarray(inputs.x).astype(np.float32)
    groups = x.reshape(len(x), -1, 64)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    factor = 2.0 ** (7 - np.floor(np.log2(largest)))  # the largest is then 128 or more, below 256
    rounded = ((groups * factor).astype(FP8).astype(np.float64) / factor).reshape(x.shape)
    exact = cases.exact_matrix(inputs.weight)[:64]
    found = product(library, "single", n, inputs.weight, x, row=0, blocks=range(columns // 128))
    assert (np.abs(found - rounded @ exact.T) <= 1e-5 * (np.abs(x) @ np.abs(exact).T)).all()


def int4_problem(columns: int, tokens: int) -> tuple[QuantizedMatrix, np.ndarray]:
    case = cases.Case(name="", kind="int4", block=(1, 128), rows=64, columns=columns, tokens=tokens, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=2)
    return inputs.weight, np.asarray(inputs.x).astype(np.float64)


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_integers_are_exact_down_to_a_128th_of_the_largest(library, tokens):
    matrix, x = int4_problem(512, tokens)
    x = np.where(np.abs(x) < 0.05, 0.0, np.clip(x, -6, 6))
    exact = cases.exact_matrix(matrix)
    found = product(library, "integer", 8, matrix, x, row=0, blocks=range(2))
    assert (np.abs(found - x @ exact.T) <= 2**-20 * (np.abs(x) @ np.abs(exact).T)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_gives_no_number_and_leaves_the_others(library, value):
    matrix, x = int4_problem(256, 3)
    alone = product(library, "integer", 8, matrix, x, row=0, blocks=range(1))
    x[1, 77] = value
    found = product(library, "integer", 8, matrix, x, row=0, blocks=range(1))
    assert not np.isfinite(found[1]).any()
    assert_has_values(alone[[0, 2]])
    np.testing.assert_array_equal(found[[0, 2]], alone[[0, 2]])
