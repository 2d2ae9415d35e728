"""Tests the CUDA kernels of the experts against float64 on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.experts import ExpertWeights, Routing, cases, sm90
from meshserve.kernels.linear import layer_of

from .comparing import assert_has_values

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BOUND = 8e-3  # limit of ||out - expected|| / ||expected||; rounding to bfloat16 alone: 2e-3 to 4e-3
CASES = (
    *(cases.Case(**{**vars(case), "dtype": "bfloat16"}) for case in cases.CASES),
    *(
        cases.Case(name=f"fp8-{num_tokens}", num_tokens=num_tokens, num_experts=24, embed=256, mlp=256,
                   padding=7 if num_tokens > 1 else 0, skew=0.5, dtype="bfloat16", is_fp8=True)
        for num_tokens in (1, 3, 8, 9, 40, 130, 256, 300, 1000, 3000)
    ),
    *(
        cases.Case(name=f"30b-a3b-fp8-{num_tokens}", num_tokens=num_tokens, num_chosen=8, embed=2048, mlp=768,
                   dtype="bfloat16", is_fp8=True)
        for num_tokens in (1, 2)
    ),
    *(
        cases.Case(name=f"480b-a35b-fp8-{num_tokens}", num_tokens=num_tokens, num_experts=8, embed=6144, mlp=256,
                   dtype="bfloat16", is_fp8=True)
        for num_tokens in (3, 50)
    ),
    cases.Case(name="30b-a3b-fp8-32", num_tokens=32, num_chosen=8, embed=2048, mlp=768, dtype="bfloat16", is_fp8=True),
    *(
        cases.Case(name=f"wide-{'fp8' if is_fp8 else 'bf16'}-{tokens}-{embed}", num_tokens=tokens, num_experts=40,
                   num_chosen=6, embed=embed, mlp=384, padding=0 if tokens == 1 else 3, skew=0.5, dtype="bfloat16",
                   is_fp8=is_fp8)
        for is_fp8 in (False, True) for tokens, embed in ((1, 2048), (1, 4096), (5, 2048), (8, 4096))
    ),
    cases.Case(name="eight", num_tokens=8, num_experts=32, dtype="bfloat16"),
    cases.Case(name="few-and-skewed", num_tokens=7, padding=3, skew=1.5, mlp=96, embed=512, dtype="bfloat16"),
    cases.Case(name="nine", num_tokens=9, num_experts=32, dtype="bfloat16"),
    cases.Case(name="sixteen", num_tokens=16, padding=5, dtype="bfloat16"),
    cases.Case(name="every-token-one-expert", num_tokens=256, num_experts=8, num_chosen=8, dtype="bfloat16"),
    cases.Case(name="skewed-and-blocks", num_tokens=250, skew=1.5, num_experts=64, block_experts=32, dtype="bfloat16"),
    cases.Case(name="30b-a3b-one", num_tokens=1, num_chosen=8, embed=2048, mlp=768, dtype="bfloat16"),
    cases.Case(name="30b-a3b-eight", num_tokens=8, num_chosen=8, embed=2048, mlp=768, dtype="bfloat16"),
    cases.Case(name="30b-a3b", num_tokens=96, num_chosen=8, embed=2048, mlp=768, padding=9, dtype="bfloat16"),
    cases.Case(
        name="235b-a22b-slice", num_tokens=30, num_chosen=8, embed=4096, mlp=192, num_layers=1,
        dtype="bfloat16",
    ),
    cases.Case(name="many", num_tokens=1000, num_experts=24, num_chosen=5, mlp=96, padding=7, dtype="bfloat16"),
    *(
        cases.Case(name=f"30b-a3b-{'fp8-' if is_fp8 else ''}{num_tokens}", num_tokens=num_tokens, num_experts=16,
                   num_chosen=2, embed=2048, mlp=768, num_layers=1, dtype="bfloat16", is_fp8=is_fp8)
        for num_tokens in (520, 1030, 1500, 2300) for is_fp8 in (False, True)
    ),  # experts of about 65, 129, 188 and 288 tokens
    cases.Case(name="many-skewed", num_tokens=3000, num_experts=128, num_chosen=8, skew=1.0, dtype="bfloat16"),
)  # fmt: skip


@functools.cache
def compiled(most_few_tokens: int):
    call = functools.partial(sm90.experts, most_few_tokens=most_few_tokens, num_experts=1)
    return jax.jit(call, static_argnames="layer")


def rounded(x: np.ndarray) -> np.ndarray:
    """Returns activations [T, K] rounded to e4m3 with a scale for each token and 128 columns."""
    parts = x.astype(np.float32).reshape(len(x), -1, 128)
    highest = np.abs(parts).max(axis=2, keepdims=True)
    scale = np.where(highest > 0, highest / np.float32(448), np.float32(1)).astype(np.float32)
    return ((parts / scale).astype(jnp.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


def expected(inputs: cases.Inputs, layer: int, *, is_rounded: bool) -> np.ndarray:
    """Returns the output in float64, expert by expert, of activations as they are or rounded to e4m3."""
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    x = np.nan_to_num(np.asarray(inputs.x, np.float64))
    outputs = np.zeros(x.shape)
    kept = rounded if is_rounded else np.asarray
    for expert in range(inputs.weights.down.shape[1]):
        tokens, slots = np.nonzero(chosen == expert)
        if len(tokens):
            gate_up, down = (np.asarray(layer_of(stack, (layer, expert)), np.float64) for stack in inputs.weights)
            gate, up = (kept(x[tokens]) @ matrix.T for matrix in gate_up)
            outputs[tokens] += shares[tokens, slots, None] * (kept(gate / (1 + np.exp(-gate)) * up) @ down.T)
    return outputs


@pytest.mark.parametrize(
    ("case", "most_few_tokens"),
    [(case, 0) for case in CASES]
    + [(case, sm90.FEW_TOKENS) for case in CASES if case.num_tokens <= sm90.FEW_TOKENS and case.embed in (2048, 4096)],
    ids=lambda value: value.name if isinstance(value, cases.Case) else "few" if value else "many",
)
def test_every_case_is_the_float64_computation(case, most_few_tokens):
    """In tiles, 8-bit weights are multiplied with activations rounded to e4m3, as in the reference."""
    inputs, layer = cases.make_inputs(case, seed=1), case.num_layers - 1
    run = compiled(most_few_tokens)
    found = np.asarray(run(inputs.x, inputs.weights, inputs.routing, layer=layer))
    is_rounded = case.is_fp8 and most_few_tokens == 0
    truth = expected(inputs, layer, is_rounded=is_rounded)
    found64 = found.astype(np.float64)
    if case.is_zero:
        np.testing.assert_array_equal(truth, 0)
    else:
        assert_has_values(truth)
        print(f"error {np.linalg.norm(found64 - truth) / np.linalg.norm(truth):.2e}")
    assert np.isfinite(found64).all()
    is_here = (np.abs(truth).sum(axis=1) > 0)[:, None]
    np.testing.assert_array_equal(np.where(is_here, 0, found64), 0)
    error = np.linalg.norm(found64 - truth, axis=1)
    assert (error <= 4 * BOUND * np.linalg.norm(truth, axis=1)).all()
    # The FP8 tensor cores' sums have some 14 bits, so a few activations are rounded the other way than in float64. With
    # errors of 5e-4 in the reference's gate and up, a single token differs by up to 1.2e-2.
    assert np.linalg.norm(error) <= (2 if is_rounded else 1) * BOUND * np.linalg.norm(truth)
    again = np.asarray(run(inputs.x, inputs.weights, inputs.routing, layer=layer))
    np.testing.assert_array_equal(again, found)  # bitwise equal: no races


@pytest.mark.parametrize("num_tokens", [3, 20, 400])
def test_experts_that_no_token_chose_are_not_read(num_tokens):
    case = cases.Case(name="", num_tokens=num_tokens, num_experts=64, num_chosen=2, embed=2048, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=2)
    chosen = np.asarray(inputs.routing.experts) % 8
    chosen[:, 1] = (chosen[:, 0] + 1) % 8
    routing = Routing(jnp.asarray(chosen), inputs.routing.weights)
    spoiled = ExpertWeights(*(stack.at[:, 8:].set(jnp.nan) for stack in inputs.weights))
    run = compiled(sm90.FEW_TOKENS)
    expected = np.asarray(run(inputs.x, inputs.weights, routing, layer=0))
    assert_has_values(expected)
    np.testing.assert_array_equal(np.asarray(run(inputs.x, spoiled, routing, layer=0)), expected)


def test_a_token_does_not_depend_on_the_others():
    """Alone, among few tokens and among many: the same up to the kernels' order of sums."""
    case = cases.Case(name="", num_tokens=300, num_experts=32, embed=2048, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=3)
    whole = np.asarray(compiled(0)(inputs.x, inputs.weights, inputs.routing, layer=0), np.float32)
    assert_has_values(whole)
    for first, last in ((7, 8), (0, 8), (0, 12), (100, 140)):
        routing = Routing(*(array[first:last] for array in inputs.routing))
        part = compiled(sm90.FEW_TOKENS)(inputs.x[first:last], inputs.weights, routing, layer=0)
        np.testing.assert_allclose(np.asarray(part, np.float32), whole[first:last], atol=0.03, rtol=0.03)


def test_the_layer_is_a_constant_and_shapes_are_checked():
    inputs = cases.make_inputs(cases.Case(name="", num_tokens=2, dtype="bfloat16"), seed=4)
    with pytest.raises(TypeError, match="unroll the layers"):
        sm90.experts(inputs.x, inputs.weights, inputs.routing, layer=jnp.int32(0), num_experts=16)
    with pytest.raises(ValueError, match="x is float32; bfloat16 is needed. Use 'xla'"):
        sm90.experts(inputs.x.astype(jnp.float32), inputs.weights, inputs.routing, layer=0, num_experts=16)
