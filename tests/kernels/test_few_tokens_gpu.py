"""Tests products of few tokens with quantized weights on an NVIDIA GPU since Ampere against float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.linear import cases, sm80

from .comparing import assert_has_values

REASON = build.unavailable_reason(None, build.PORTABLE)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CASES = tuple(
    cases.Case(kind=kind, block=block, rows=rows, columns=columns, scale_dtype=dtype, dtype="bfloat16", name=name)
    for name, kind, block, rows, columns, dtype in (
        ("fp8-block", "fp8", (128, 128), 6144, 4096, "bfloat16"),
        ("fp8-block-of-a-shard", "fp8", (64, 64), 2560, 1216, "float32"),
        ("fp8-channel", "fp8", (1, 2560), 2560, 2560, "float32"),
        ("int4-32", "int4", (1, 32), 1024, 2560, "bfloat16"),
        ("int4-128", "int4", (1, 128), 4096, 12_288, "bfloat16"),
        ("int4-128-zero", "int4-zero", (1, 128), 4096, 4096, "float16"),
    )
)


@pytest.mark.parametrize("tokens", [1, 8, 13, 32, sm80.MAX_TOKENS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_product_is_the_float64_computation(case: cases.Case, tokens: int) -> None:
    inputs = cases.make_inputs(dataclasses.replace(case, tokens=tokens), seed=1)
    assert sm80.unsupported_reason(inputs.weight, inputs.x.dtype) is None
    expected = cases.expected(inputs)
    assert_has_values(expected)
    wide = jax.jit(partial(sm80.linear, out_dtype=jnp.dtype("float32")))(inputs.x, inputs.weight)
    assert np.linalg.norm(wide - expected) < 1e-5 * np.linalg.norm(expected)
    rounded = jax.jit(sm80.linear)(inputs.x, inputs.weight)
    np.testing.assert_array_equal(rounded, wide.astype(jnp.bfloat16))
    residual = 50 * rounded[::-1]
    summed = jax.jit(sm80.linear)(inputs.x, inputs.weight, residual=residual)
    np.testing.assert_array_equal(summed, residual + rounded)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_tokens_result_does_not_depend_on_the_others(case: cases.Case) -> None:
    inputs = cases.make_inputs(dataclasses.replace(case, tokens=sm80.MAX_TOKENS), seed=2)
    whole = jax.jit(sm80.linear)(inputs.x, inputs.weight)
    assert_has_values(whole)
    for tokens in (1, 9, 30):
        part = jax.jit(sm80.linear)(inputs.x[-tokens:], inputs.weight)
        np.testing.assert_array_equal(part, whole[-tokens:])
