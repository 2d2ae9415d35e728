"""Tests products of few tokens for all GPUs since Ampere (few_tokens.cuh), compiled for the host."""

import ctypes
import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from meshserve.kernels.linear import INT4, cases
from meshserve.kernels.linear.sm80 import MAX_TOKENS

from . import on_host
from .comparing import assert_has_values
from .test_quantized_emulated import Scales, scales_of

pytestmark = on_host.needs_compiler


class Args(ctypes.Structure):
    """Mirrors ProductArgs."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "weights")]
        + [("scales", Scales)]
        + [(name, ctypes.c_void_p) for name in ("residual", "out")]
        + [(name, ctypes.c_int) for name in ("num_tokens", "rows", "columns")]
        + [("is_float", ctypes.c_bool)]
    )  # fmt: skip


def _case(name: str, kind: str, block: tuple[int, int], columns: int, **shape) -> cases.Case:
    return cases.Case(name=name, kind=kind, block=block, columns=columns, dtype="bfloat16", **shape)


CASES = (
    _case("fp8-block", "fp8", (128, 128), 1280, rows=128),
    _case("fp8-block-of-a-shard", "fp8", (16, 64), 576, rows=48, scale_dtype="bfloat16"),
    _case("fp8-channel", "fp8", (1, 192), 192, rows=80, scale_dtype="float16"),
    _case("fp8-stacked", "fp8", (32, 128), 128, rows=32, leading=(2,)),
    _case("int4-32", "int4", (1, 32), 640, rows=48),
    _case("int4-64-zero", "int4-zero", (1, 64), 1152, rows=32, scale_dtype="float16"),
    _case("int4-128-zero", "int4-zero", (1, 128), 1280, rows=80, scale_dtype="bfloat16"),
    _case("int4-channel", "int4", (1, 384), 384, rows=16, leading=(3,)),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "few_tokens.cpp", flags=flags)


def product(
    library: ctypes.CDLL,
    inputs: cases.Inputs,
    row_tiles: int,
    residual: np.ndarray | None = None,
    dtype: str = "float32",
) -> np.ndarray:
    """Returns the product [T, N] of the kernel with 16 times `row_tiles` rows in a block."""
    matrix, x = inputs.weight, np.ascontiguousarray(inputs.x)
    columns, num_rows = matrix.shape[-1], int(np.prod(matrix.shape[:-1]))
    data = np.ascontiguousarray(matrix.data)
    scale = np.ascontiguousarray(matrix.scale).reshape(-1, matrix.scale.shape[-1])
    zero = None if matrix.zero is None else np.ascontiguousarray(matrix.zero)
    scales = scales_of(scale, zero, num_rows, columns)
    out = np.full((len(x), num_rows), np.nan, jnp.dtype(dtype))
    args = Args(
        x=x.ctypes.data, weights=data.ctypes.data, scales=scales, out=out.ctypes.data,
        residual=None if residual is None else residual.ctypes.data,
        num_tokens=len(x), rows=num_rows, columns=columns, is_float=dtype == "float32",
    )  # fmt: skip
    library.multiply(row_tiles, matrix.format == INT4, ctypes.byref(args))
    return out


@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("tokens", [1, 9, 19, MAX_TOKENS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_product_is_that_of_exactly_dequantized_weights(library, case, tokens, row_tiles):
    inputs = cases.make_inputs(dataclasses.replace(case, tokens=tokens), seed=1)
    found, expected = product(library, inputs, row_tiles), cases.expected(inputs)
    assert found.shape == expected.shape
    assert_has_values(expected)
    assert np.linalg.norm(found - expected) < 2e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES[:1] + CASES[4:5], ids=lambda case: case.name)
def test_a_tokens_result_does_not_depend_on_the_others(library, case):
    inputs = cases.make_inputs(dataclasses.replace(case, tokens=MAX_TOKENS), seed=2)
    whole = product(library, inputs, 2)
    assert_has_values(whole)
    for tokens, row_tiles in ((1, 1), (7, 2), (16, 1), (30, 2)):
        part = product(library, cases.Inputs(inputs.x[-tokens:], inputs.weight), row_tiles)
        np.testing.assert_array_equal(part, whole[-tokens:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_residual_is_added_to_the_rounded_product(library, dtype):
    inputs = cases.make_inputs(dataclasses.replace(CASES[0], tokens=9), seed=3)
    plain = product(library, inputs, 1, dtype=dtype)
    residual = (np.random.default_rng(4).standard_normal(plain.shape) * 50).astype(jnp.dtype(dtype))
    expected = (residual.astype(np.float32) + plain.astype(np.float32)).astype(jnp.dtype(dtype))
    assert_has_values(expected)
    np.testing.assert_array_equal(product(library, inputs, 1, residual, dtype), expected)
    rounded = product(library, inputs, 1).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    np.testing.assert_array_equal(plain, rounded)
