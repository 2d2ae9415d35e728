"""Tests every implementation of the linear operation against a float64 computation, case by case."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.linear import (
    E4M3,
    FP8,
    FP8_MAX,
    Prologue,
    QuantizedMatrix,
    RMSNorm,
    cases,
    dequantized,
    implementation,
    silu_product,
    sm80,
    sm90,
    to_fp8,
    xla,
)
from meshserve.kernels.linear.formats import SCALE

from .comparing import assert_has_values

NAMES = ("reference", "xla", "xla_fp8")  # that run on any backend

BOUNDS = {"float32": 2e-6, "bfloat16": 6e-3}  # norm of the error over norm of the result


def fp8_shapes(shape: tuple[int, int], grid: tuple[int, int]) -> QuantizedMatrix:
    return QuantizedMatrix(E4M3, jax.ShapeDtypeStruct(shape, FP8), {SCALE: jax.ShapeDtypeStruct(grid, jnp.float32)})


def relative_error(found: jax.Array, expected: np.ndarray) -> float:
    assert_has_values(expected)
    return float(np.linalg.norm(np.asarray(found).astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", NAMES)
def test_the_product_is_the_float64_computation(name: str, case: cases.Case) -> None:
    inputs = cases.make_inputs(case, seed=1)
    product = jax.jit(implementation(name))(inputs.x, inputs.weight)
    assert product.dtype == inputs.x.dtype
    expected = cases.expected(inputs, is_fp8=name == "xla_fp8")
    assert product.shape == expected.shape
    assert relative_error(product, expected) < BOUNDS[case.dtype]


@pytest.mark.parametrize("name", NAMES)
def test_the_result_can_be_float32(name: str) -> None:
    case = next(case for case in cases.CASES if case.name == "fp8-block-bfloat16")
    inputs = cases.make_inputs(case, seed=2)
    product = implementation(name)(inputs.x, inputs.weight, out_dtype=jnp.dtype("float32"))
    assert product.dtype == jnp.float32
    assert relative_error(product, cases.expected(inputs, is_fp8=name == "xla_fp8")) < BOUNDS["bfloat16"]


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.kind != "plain"], ids=lambda case: case.name)
def test_dequantized_elements_are_rounded_once(case: cases.Case) -> None:
    weight = cases.make_inputs(case, seed=3).weight
    assert isinstance(weight, QuantizedMatrix)
    exact = cases.exact_matrix(weight)
    assert_has_values(exact)
    np.testing.assert_array_equal(dequantized(weight), exact.astype(np.float32))
    assert weight.shape == exact.shape and weight.block == case.block


def test_rounded_activations_differ_from_the_others() -> None:
    """The two modes are told apart by the bounds of the first test."""
    inputs = cases.make_inputs(next(case for case in cases.CASES if case.name == "fp8-block"), seed=4)
    difference = relative_error(jnp.asarray(cases.expected(inputs, is_fp8=True)), cases.expected(inputs))
    assert 0.01 < difference < 0.05


def test_tokens_of_zeros_give_zeros() -> None:
    inputs = cases.make_inputs(next(case for case in cases.CASES if case.name == "fp8-channel"), seed=5)
    product = implementation("xla_fp8")(jnp.zeros_like(inputs.x), inputs.weight)
    np.testing.assert_array_equal(product, 0.0)


def test_numbers_beyond_the_range_of_fp8_saturate() -> None:
    values = to_fp8(jnp.array([449.0, -1e30, 0.0, 1.0, jnp.inf]))
    assert values.dtype == FP8
    np.testing.assert_array_equal(values.astype(jnp.float32), [FP8_MAX, -FP8_MAX, 0.0, 1.0, FP8_MAX])


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match="'fast'; this build has cuda_fp8, portable, xla"):
        implementation("fast")


@pytest.mark.parametrize("prologue", [RMSNorm(jnp.linspace(0.5, 2.0, 256), 1e-6), silu_product], ids=["norm", "silu"])
@pytest.mark.parametrize("name", NAMES)
def test_the_prologue_is_applied(name: str, prologue: Prologue) -> None:
    inputs = cases.make_inputs(next(case for case in cases.CASES if case.name == "fp8-block"), seed=6)
    x = jnp.concatenate([inputs.x, inputs.x + 1], axis=1) if prologue is silu_product else inputs.x
    product = implementation(name)(x, inputs.weight, prologue=prologue)
    expected = cases.expected(cases.Inputs(prologue(x), inputs.weight), is_fp8=name == "xla_fp8")
    assert relative_error(product, expected) < BOUNDS["float32"]
    residual = jnp.full(product.shape, 3.0)
    summed = implementation(name)(x, inputs.weight, prologue=prologue, residual=residual)
    assert_has_values(product)
    np.testing.assert_allclose(summed, product + 3.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("plain-bfloat16-stacked", "bfloat16", "the weights are not quantized"),
        ("int4-128-zero-bfloat16", "bfloat16", "int4 weights are dequantized"),
        ("fp8-block", "float32", "activations are float32; bfloat16 is needed"),
        ("fp8-block-of-rows", "bfloat16", "a scale covers 32 x 96 elements on a device"),
        ("fp8-channel-bfloat16", "bfloat16", None),
        ("fp8-block-bfloat16", "bfloat16", None),
    ],
)
def test_products_without_fp8_tensor_cores_have_a_reason(name: str, dtype: str, reason: str | None) -> None:
    weight = cases.make_inputs(next(case for case in cases.CASES if case.name == name), seed=7).weight
    found = sm90.unsupported_reason(weight, jnp.dtype(dtype))
    assert found == reason if reason is None else reason in str(found)


def test_what_the_fp8_tensor_cores_do_not_take_is_dequantized() -> None:
    inputs = cases.make_inputs(next(case for case in cases.CASES if case.name == "fp8-block-of-rows"), seed=8)
    np.testing.assert_array_equal(
        implementation("cuda_fp8")(inputs.x, inputs.weight), implementation("xla")(inputs.x, inputs.weight)
    )


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("plain-bfloat16-stacked", "bfloat16", "the weights are not quantized"),
        ("fp8-block", "float32", "activations are float32; bfloat16 is needed"),
        ("fp8-block-cut", "bfloat16", "192 rows and 48 columns on a device; multiples of 16 and 64 are needed"),
        ("int4-cut", "bfloat16", "6 rows and 38 columns on a device; multiples of 16 and 128 are needed"),
        ("fp8-channel-bfloat16", "bfloat16", None),
        ("fp8-block-bfloat16", "bfloat16", None),
        ("int4-32", "bfloat16", None),
        ("int4-128-zero-bfloat16", "bfloat16", None),
    ],
)
def test_few_tokens_are_not_multiplied_by_every_matrix(name: str, dtype: str, reason: str | None) -> None:
    inputs = cases.make_inputs(next(case for case in cases.CASES if case.name == name), seed=7)
    assert sm80.unsupported_reason(inputs.weight, jnp.dtype(dtype)) == reason
    many = jnp.ones((sm80.MAX_TOKENS + 1, inputs.x.shape[1]), dtype)  # which XLA multiplies
    product = implementation("portable")(many, inputs.weight)
    assert_has_values(product)
    np.testing.assert_array_equal(product, implementation("xla")(many, inputs.weight))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("plain", "the output head is not FP8"),
        ("int4-32", "the output head is not FP8"),
        ("fp8-channel", "activations are float32; bfloat16 is needed"),
    ],
)
def test_an_output_head_that_the_kernel_does_not_take_is_left_to_xla(name: str, reason: str) -> None:
    inputs = cases.make_inputs(next(case for case in cases.CASES if case.name == name), seed=1)
    assert sm90.unsupported_head_reason(inputs.weight, inputs.x.dtype) == reason
    float32 = jnp.dtype("float32")
    logits = sm90.output_head(inputs.x, inputs.weight, out_dtype=float32)
    assert_has_values(logits)
    np.testing.assert_array_equal(logits, xla.linear(inputs.x, inputs.weight, out_dtype=float32))


def test_output_heads_of_every_shard_are_taken() -> None:
    for tp, columns in itertools.product((1, 2, 4, 8), (1024, 2048, 2560, 4096)):
        rows = 151_936 // tp
        head = fp8_shapes((rows, columns), (rows, 1))
        assert sm90.unsupported_head_reason(head, jnp.dtype("bfloat16")) is None
    odd = fp8_shapes((1000, 4096), (1000, 1))
    assert sm90.unsupported_head_reason(odd, jnp.dtype("bfloat16")) == (
        "1000 rows and 4096 columns on a device; multiples of 16 and 64 are needed"
    )


@pytest.mark.parametrize(
    ("rows", "columns", "num_tokens", "tile"),
    [
        (6144, 4096, 128, None),  # an 8B's QKV
        (4096, 4096, 128, 15),
        (4096, 12_288, 128, 15),
        (4096, 12_288, 192, None),
        (24_576, 4096, 128, None),
        (5120, 5120, 128, None),  # a 14B's
        (2560, 9728, 128, 15),  # a 4B's
        (4096, 4096, 96, None),
    ],
)
def test_128_tokens_take_the_tile_that_fills_the_gpu(
    rows: int, columns: int, num_tokens: int, tile: int | None
) -> None:
    algorithm = sm90.algorithm_for(fp8_shapes((rows, columns), (rows // 128, columns // 128)), num_tokens)
    assert (algorithm.candidate // 256 or None) == tile
    assert not (tile and algorithm.is_spread)
