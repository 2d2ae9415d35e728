"""Tests the experts' kernels for all NVIDIA GPUs since Ampere against float64, on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.experts import ExpertWeights, Routing, cases, sm80

from .comparing import assert_has_values
from .expert_values import CASES, check, expected

REASON = build.unavailable_reason(None, build.PORTABLE)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FORMS = {
    "bf16": {},
    "fp8": {"is_fp8": True},
    "fp8-rows": {"is_fp8": True, "is_by_row": True},
    "int4-32": {"packed": "int4", "group": 32},
    "int4-128": {"packed": "int4-zero", "group": 128},
}
LARGE = tuple(
    cases.Case(name=f"30b-a3b-{name}-{num_tokens}", num_tokens=num_tokens, num_experts=16, num_chosen=4, embed=2048,
               mlp=768, padding=9 if num_tokens > 1 else 0, skew=0.5, num_layers=1, dtype="bfloat16", **form)
    for name, form in FORMS.items() for num_tokens in (1, 2, 8, 31, 64, 65, 130, 700)
) + (
    cases.Case(name="235b-a22b-slice", num_tokens=30, num_chosen=8, embed=4096, mlp=192, num_layers=1,
               dtype="bfloat16"),
    cases.Case(name="every-token-one-expert", num_tokens=64, num_experts=8, num_chosen=8, dtype="bfloat16"),
    cases.Case(name="many-skewed", num_tokens=3000, num_experts=128, num_chosen=8, skew=1.0, dtype="bfloat16"),
    cases.Case(name="skewed-and-blocks", num_tokens=250, skew=1.5, num_experts=64, block_experts=32, dtype="bfloat16"),
    cases.Case(name="128-experts", num_tokens=48, num_experts=128, num_chosen=8, embed=2048, mlp=256, num_layers=1,
               dtype="bfloat16"),
    cases.Case(name="256-experts", num_tokens=300, num_experts=256, num_chosen=8, dtype="bfloat16"),
)  # fmt: skip


@functools.cache
def compiled(most_few_tokens: int, num_experts: int):
    call = functools.partial(sm80.experts, most_few_tokens=most_few_tokens, num_experts=num_experts)
    return jax.jit(call, static_argnames="layer")


def arguments():
    """Returns (case, most_few_tokens, number of experts that the tokens are said to have chosen from)."""
    for case in CASES + LARGE:
        yield case, sm80.FEW_TOKENS, case.num_experts
        choices = case.num_tokens * case.num_chosen
        for tile_tokens, mean in ((32, 8), (64, 64), (128, 128)):
            if choices >= mean or tile_tokens == 32:
                yield case, 0, max(choices // mean, 1)


@pytest.mark.parametrize(
    ("case", "most_few_tokens", "num_experts"), arguments(), ids=lambda it: getattr(it, "name", it)
)
def test_every_case_is_the_float64_computation(case: cases.Case, most_few_tokens: int, num_experts: int) -> None:
    inputs, layer = cases.make_inputs(case, seed=1), case.num_layers - 1
    assert sm80.unsupported_reason(inputs.weights) is None
    run = compiled(most_few_tokens, num_experts)
    found = np.asarray(run(inputs.x, inputs.weights, inputs.routing, layer=layer))
    truth = expected(inputs, layer)
    if not case.is_zero:
        assert_has_values(truth)
        print(f"error {np.linalg.norm(found.astype(np.float64) - truth) / np.linalg.norm(truth):.2e}")
    check(found, truth)
    again = np.asarray(run(inputs.x, inputs.weights, inputs.routing, layer=layer))
    np.testing.assert_array_equal(again, found)  # bitwise equal: no races


@pytest.mark.parametrize("num_tokens", [1, 20, 400])
def test_experts_that_no_token_chose_are_not_read(num_tokens: int) -> None:
    case = cases.Case(name="", num_tokens=num_tokens, num_experts=64, num_chosen=2, embed=2048, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=2)
    chosen = np.asarray(inputs.routing.experts) % 8
    chosen[:, 1] = (chosen[:, 0] + 1) % 8
    routing = Routing(jnp.asarray(chosen), inputs.routing.weights)
    spoiled = ExpertWeights(*(stack.at[:, 8:].set(jnp.nan) for stack in inputs.weights))
    run = compiled(sm80.FEW_TOKENS, 64)
    whole = np.asarray(run(inputs.x, inputs.weights, routing, layer=0))
    assert_has_values(whole)
    np.testing.assert_array_equal(np.asarray(run(inputs.x, spoiled, routing, layer=0)), whole)


@pytest.mark.parametrize("form", FORMS)
def test_a_tokens_result_does_not_depend_on_the_others(form: str) -> None:
    """In steps by rows of weights, and in tiles of any size: bitwise the same."""
    case = cases.Case(
        name="", num_tokens=300, num_experts=8, num_chosen=2, embed=1024, mlp=384, dtype="bfloat16", **FORMS[form]
    )
    inputs = cases.make_inputs(case, seed=3)

    def outputs(first: int, last: int, most_few_tokens: int, num_experts: int) -> np.ndarray:
        routing = Routing(*(array[first:last] for array in inputs.routing))
        found = compiled(most_few_tokens, num_experts)(inputs.x[first:last], inputs.weights, routing, layer=0)
        return np.asarray(found)

    few, tiles = outputs(0, sm80.FEW_TOKENS, sm80.FEW_TOKENS, 8), outputs(0, 300, 0, 75)
    assert_has_values(few)
    check(few, tiles[: len(few)].astype(np.float64))
    for first, last in ((7, 8), (0, 8), (10, 40)):
        np.testing.assert_array_equal(outputs(first, last, sm80.FEW_TOKENS, 8), few[first:last])
    for first, last, num_experts in ((0, 300, 8), (0, 300, 2), (7, 8, 1), (100, 180, 2)):
        np.testing.assert_array_equal(outputs(first, last, 0, num_experts), tiles[first:last])


def test_a_layer_is_captured_in_a_graph() -> None:
    """All layers of a program run, whatever the choices are."""
    case = cases.Case(name="", num_tokens=20, num_layers=4, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=4)

    @jax.jit
    def layers(x, weights, routing):
        return [sm80.experts(x, weights, routing, layer=layer, num_experts=16) for layer in range(4)]

    for shift in range(3):
        routing = Routing((inputs.routing.experts + shift) % 16, inputs.routing.weights)
        for layer, found in enumerate(layers(inputs.x, inputs.weights, routing)):
            check(np.asarray(found), expected(cases.Inputs(inputs.x, inputs.weights, routing), layer))


def test_the_layer_is_a_constant_and_shapes_are_checked() -> None:
    inputs = cases.make_inputs(cases.Case(name="", num_tokens=2, dtype="bfloat16"), seed=4)
    with pytest.raises(TypeError, match="unroll the layers"):
        sm80.experts(inputs.x, inputs.weights, inputs.routing, layer=jnp.int32(0), num_experts=16)
    with pytest.raises(ValueError, match="x is float32; bfloat16 is needed. Use 'xla'"):
        sm80.experts(inputs.x.astype(jnp.float32), inputs.weights, inputs.routing, layer=0, num_experts=16)
