"""Tests products on the FP8 tensor cores of a Hopper GPU against float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build, cublas_lt
from meshserve.kernels.linear import Prologue, RMSNorm, cases, silu_product, sm90

from .comparing import assert_has_values

REASON = build.unavailable_reason() or cublas_lt.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BOUND = 3e-3  # limit of ||out - expected|| / ||expected||; rounding the result to bfloat16 alone costs 1.7e-3
CUT = next(case for case in cases.CASES if case.name == "fp8-block-cut")
STACKED = next(case for case in cases.MATRIX_CASES if case.name == "fp8-block-decode")


def relative_error(found: jax.Array, expected: np.ndarray) -> float:
    assert_has_values(expected)
    return float(np.linalg.norm(np.asarray(found).astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", cases.MATRIX_CASES, ids=lambda case: case.name)
def test_the_product_is_the_float64_computation(case: cases.Case) -> None:
    inputs = cases.make_inputs(case, seed=1)
    assert sm90.unsupported_reason(inputs.weight, inputs.x.dtype) is None
    product = jax.jit(sm90.linear)(inputs.x, inputs.weight)
    assert product.dtype == inputs.x.dtype
    expected = cases.expected(inputs, is_fp8=True)
    assert product.shape == expected.shape
    assert relative_error(product, expected) < BOUND
    wide = jax.jit(partial(sm90.linear, out_dtype=jnp.dtype("float32")))(inputs.x, inputs.weight)
    assert wide.dtype == jnp.float32
    assert relative_error(wide, expected) < 2e-4


def exact_prologue(prologue: Prologue, x: np.ndarray) -> np.ndarray:
    """Returns the operation in float64."""
    if isinstance(prologue, RMSNorm):
        inverse = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + prologue.epsilon)
        return x * inverse * np.asarray(prologue.gain).astype(np.float64)
    gate, up = np.split(x, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("name", ["norm", "silu"])
@pytest.mark.parametrize("case", cases.MATRIX_CASES, ids=lambda case: case.name)
def test_the_prologue_is_fused(case: cases.Case, name: str) -> None:
    inputs = cases.make_inputs(case, seed=2)
    rng = np.random.default_rng(3)
    prologue: Prologue = silu_product
    x = jnp.asarray(rng.standard_normal((case.tokens, 2 * case.columns)) * 2, "bfloat16")
    if name == "norm":
        prologue = RMSNorm(jnp.asarray(rng.uniform(0.5, 2, case.columns), "bfloat16"), 1e-6)
        x = x[:, : case.columns]
    product = jax.jit(partial(sm90.linear, prologue=prologue))(x, inputs.weight)
    rounded_once = jnp.asarray(exact_prologue(prologue, np.asarray(x).astype(np.float64)), "bfloat16")
    expected = cases.expected(cases.Inputs(rounded_once, inputs.weight), is_fp8=True)
    assert relative_error(product, expected) < BOUND


@pytest.mark.parametrize("tokens", [64, 70, 128, 256])
def test_a_residual_is_added(tokens: int) -> None:
    inputs = cases.make_inputs(dataclasses.replace(STACKED, tokens=tokens), seed=9)
    expected = cases.expected(inputs, is_fp8=True)
    residual = jnp.asarray(np.random.default_rng(10).standard_normal(expected.shape) * 50, "bfloat16")
    product = jax.jit(partial(sm90.linear, residual=residual))(inputs.x, inputs.weight)
    assert relative_error(product, expected + np.asarray(residual).astype(np.float64)) < BOUND


def test_sums_of_many_columns_keep_small_terms() -> None:
    """FP8 tensor cores cut off what is far smaller than the sum, so their sums must be added up in float32.

    All terms are positive here. Within 128 columns, 6e-4 of the sum is cut off on an H200.
    """
    case = next(case for case in cases.MATRIX_CASES if case.name == "fp8-block-many-columns")
    inputs = cases.make_inputs(case, seed=4)
    data = inputs.weight.data
    weight = dataclasses.replace(inputs.weight, data=abs(data.astype(jnp.float32)).astype(data.dtype))
    positive = cases.Inputs(abs(inputs.x), weight)
    wide = sm90.linear(positive.x, positive.weight, out_dtype=jnp.dtype("float32"))
    assert relative_error(wide, cases.expected(positive, is_fp8=True)) < 1e-3


def test_a_layer_is_read_where_it_lies_in_a_stack() -> None:
    inputs = cases.make_inputs(STACKED, seed=5)
    stack = jax.tree.map(lambda array: jnp.stack([array, array, array]), inputs.weight)
    product = jax.jit(lambda x, stack: sm90.linear(x, jax.tree.map(lambda array: array[1], stack)))
    expected = cases.expected(inputs, is_fp8=True)
    assert relative_error(product(inputs.x, stack), expected) < BOUND


def test_scales_for_other_blocks_are_left_to_xla() -> None:
    inputs = cases.make_inputs(CUT, seed=6)
    reason = sm90.unsupported_reason(inputs.weight, jnp.dtype("bfloat16"))
    assert reason == "a scale covers 64 x 16 elements on a device; 128 columns or a whole row are needed"
    product = jax.jit(sm90.linear)(inputs.x.astype(jnp.bfloat16), inputs.weight)
    x = inputs.x.astype(jnp.bfloat16)
    assert relative_error(product, cases.expected(cases.Inputs(x, inputs.weight))) < 6e-3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_that_is_not_finite_does_not_reach_the_others(value: float) -> None:
    inputs = cases.make_inputs(STACKED, seed=7)
    product = np.asarray(sm90.linear(inputs.x.at[3, 100].set(value), inputs.weight)).astype(np.float32)
    assert np.isnan(product[3]).all()
    expected = cases.expected(inputs, is_fp8=True)
    others = np.arange(len(product)) != 3
    assert relative_error(product[others], expected[others]) < BOUND


def test_tokens_of_zeros_give_zeros() -> None:
    inputs = cases.make_inputs(STACKED, seed=8)
    np.testing.assert_array_equal(np.asarray(sm90.linear(jnp.zeros_like(inputs.x), inputs.weight), np.float32), 0.0)


@pytest.mark.parametrize("tokens", [1, 9, 32, 50, 130])
@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-block"])
def test_an_output_head_keeps_the_precision_of_activations(kind: str, tokens: int) -> None:
    block = (1, 1088) if kind == "fp8-channel" else (64, 64)
    case = cases.Case(name="", kind="fp8", block=block, rows=2240, columns=1088, tokens=tokens, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=11)
    x = inputs.x.at[0, 7].set(300.0)
    assert sm90.unsupported_head_reason(inputs.weight, x.dtype) is None
    logits = jax.jit(partial(sm90.output_head, out_dtype=jnp.dtype("float32")))(x, inputs.weight)
    assert logits.dtype == jnp.float32
    assert relative_error(logits, cases.expected(cases.Inputs(x, inputs.weight))) < 1e-3


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(65, 4240, 1024), (96, 17_408, 2048), (128, 60_000, 512), (128, 160, 128), (200, 4240, 384)],
)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_an_output_head_is_read_once_for_128_tokens(tokens: int, rows: int, columns: int, scale_dtype: str) -> None:
    case = cases.Case(
        name="", kind="fp8", block=(1, columns), rows=rows, columns=columns, tokens=tokens, dtype="bfloat16",
        scale_dtype=scale_dtype,
    )  # fmt: skip
    inputs = cases.make_inputs(case, seed=12)
    run = jax.jit(partial(sm90.output_head, out_dtype=jnp.dtype("float32")))
    x = inputs.x.at[0, 7].set(300.0).at[1].set(0.0)
    assert "output_head_wide" in run.lower(x, inputs.weight).as_text()
    logits = run(x, inputs.weight)
    assert relative_error(logits, cases.expected(cases.Inputs(x, inputs.weight))) < 1e-3
    for _ in range(3):  # bitwise equal: no races
        np.testing.assert_array_equal(np.asarray(run(x, inputs.weight)), np.asarray(logits))
    with_nan = np.asarray(run(x.at[3, 100].set(np.nan), inputs.weight))
    assert np.isnan(with_nan[3]).all()
    np.testing.assert_array_equal(np.delete(with_nan, 3, 0), np.delete(np.asarray(logits), 3, 0))
