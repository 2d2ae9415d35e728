"""Tests the experts' kernels for all GPUs since Ampere (experts/sm80), compiled for the host.

Shared memory is full of NaN when a block begins, and a copy to it arrives when its thread waits for it.
"""

import ctypes
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.experts import ExpertWeights, Routing, cases, sm80
from meshserve.kernels.linear import E4M3, QuantizedMatrix

from . import on_host
from .comparing import assert_has_values
from .expert_values import CASES, check, expected
from .test_quantized_emulated import Scales, scales_of

pytestmark = on_host.needs_compiler
BOUND = 4e-3
TILE_TOKENS = {32: 8, 64: 64, 128: 128}  # tokens of a tile, and a mean number of tokens of an expert that leads to it


class Stack(ctypes.Structure):
    """Mirrors the struct in formats.cuh."""

    _fields_ = [("data", ctypes.c_void_p), ("scales", Scales)]


class Shapes(ctypes.Structure):
    """Mirrors the struct in schedule.cuh."""

    _fields_ = [(name, ctypes.c_int) for name in ("tokens", "chosen", "experts", "embed", "mlp", "format")]


class Call(ctypes.Structure):
    """Mirrors the struct in schedule.cuh."""

    _fields_ = (
        [("x", ctypes.c_void_p), ("gate_up", Stack), ("down", Stack)]
        + [(name, ctypes.c_void_p) for name in ("experts", "shares", "out", "scratch")]
        + [(name, ctypes.c_int) for name in ("layer", "num_experts", "most_few_tokens")]
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    compiled = on_host.compiled(tmp_path_factory.mktemp("emulated"), "experts_sm80.cpp", flags=flags)
    compiled.scratch_bytes.restype = ctypes.c_size_t
    return compiled


def stack_of(matrix) -> tuple[Stack, list[np.ndarray]]:
    """Returns a stack, and the arrays that must outlive it."""
    if not isinstance(matrix, QuantizedMatrix):
        data = np.ascontiguousarray(matrix)
        return Stack(data.ctypes.data, Scales()), [data]
    data, scale = np.ascontiguousarray(matrix.data), np.ascontiguousarray(matrix.scale)
    scale = scale.reshape(-1, scale.shape[-1])
    zero = None if matrix.zero is None else np.ascontiguousarray(matrix.zero)
    scales = scales_of(scale, zero, int(np.prod(matrix.shape[:-1])), matrix.shape[-1])
    return Stack(data.ctypes.data, scales), [data, scale, zero]


def run(library, inputs: cases.Inputs, *, layer: int = 1, tile_tokens: int = 0, num_multiprocessors: int = 2):
    """Returns the output [T, D], by rows of weights or in tiles of as many tokens."""
    assert sm80.unsupported_reason(inputs.weights) is None
    x, chosen = np.ascontiguousarray(inputs.x), np.ascontiguousarray(inputs.routing.experts)
    shares = np.ascontiguousarray(inputs.routing.weights)
    (gate_up, kept), (down, also_kept) = map(stack_of, inputs.weights)
    _, num_local, embed, mlp = inputs.weights.down.shape
    form = None if inputs.weights.quantized is None else inputs.weights.quantized[0].format
    shapes = Shapes(*chosen.shape, num_local, embed, mlp, 0 if form is None else 1 if form == E4M3 else 2)
    out = np.full(x.shape, np.nan, jnp.bfloat16)
    scratch = np.full(library.scratch_bytes(ctypes.byref(shapes)) + 16, 0xFF, np.uint8)  # NaN
    start = -scratch.ctypes.data % 16
    call = Call(
        x.ctypes.data, gate_up, down, chosen.ctypes.data, shares.ctypes.data, out.ctypes.data,
        scratch.ctypes.data + start, layer,
        chosen.size // TILE_TOKENS[tile_tokens] if tile_tokens else 1, 0 if tile_tokens else sm80.FEW_TOKENS,
    )  # fmt: skip
    library.run_experts(ctypes.byref(shapes), ctypes.byref(call), num_multiprocessors)
    del kept, also_kept
    return out


@pytest.mark.parametrize("tile_tokens", [0, 32])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_the_float64_computation(library, case, tile_tokens):
    inputs = cases.make_inputs(case, seed=1)
    truth = expected(inputs, 1)
    if not case.is_zero:
        assert_has_values(truth)
    check(run(library, inputs, tile_tokens=tile_tokens), truth, bound=BOUND)


MANY = [case for case in CASES if case.name in ("bfloat16", "fp8", "int4-32", "int4-128-zero", "broken-lanes")]


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_larger_tiles_give_the_same_result(library, case):
    """Also of more tokens than a chunk of the order has, and of experts with several tiles."""
    case = dataclasses.replace(case, num_tokens=290, num_chosen=1, num_experts=3, skew=1.0, padding=0)
    inputs = cases.make_inputs(case, seed=2)
    found = run(library, inputs, tile_tokens=32)
    check(found, expected(inputs, 1), bound=BOUND)
    for tile_tokens in (64, 128):
        np.testing.assert_array_equal(run(library, inputs, tile_tokens=tile_tokens), found)


FORMS = [case for case in CASES if case.name in ("bfloat16", "fp8", "int4-32", "int4-128-zero")]


@pytest.mark.parametrize("case", FORMS, ids=lambda case: case.name)
def test_a_tokens_result_does_not_depend_on_the_others(library, case):
    """By rows of weights also where one warp, and not two, has all columns of a tile."""
    inputs = cases.make_inputs(dataclasses.replace(case, num_tokens=24, padding=0, mlp=256), seed=3)
    if case.name == "bfloat16":  # the first and the last column cancel, so that the order of float32 sums shows
        gate_up, down = inputs.weights
        gate_up = gate_up.at[:, :, :, -1].set(gate_up[:, :, :, 0])
        down = down.at[..., 0].set(2.0**14).at[..., -1].set(-(2.0**14))
        inputs = dataclasses.replace(inputs, weights=ExpertWeights(gate_up, down))
    whole = run(library, inputs, num_multiprocessors=3)
    assert_has_values(whole)
    assert len(np.unique(inputs.routing.experts)) >= 16 > 2 * case.num_chosen, "tiles with one warp, and with two"
    tiles = run(library, inputs, tile_tokens=32)
    for first, last in ((5, 6), (10, 12)):
        routing = Routing(*(array[first:last] for array in inputs.routing))
        part = cases.Inputs(inputs.x[first:last], inputs.weights, routing)
        np.testing.assert_array_equal(run(library, part, num_multiprocessors=1), whole[first:last])
        np.testing.assert_array_equal(run(library, part, tile_tokens=32), tiles[first:last])


@pytest.mark.parametrize("tile_tokens", [0, 32])
def test_experts_that_no_token_chose_are_not_read(library, tile_tokens):
    inputs = cases.make_inputs(dataclasses.replace(FORMS[0], num_tokens=6, num_chosen=1), seed=4)
    chosen = set(np.asarray(inputs.routing.experts).ravel().tolist())
    others = np.array([expert for expert in range(FORMS[0].num_experts) if expert not in chosen])
    spoiled = ExpertWeights(*(stack.at[:, others].set(jnp.nan) for stack in inputs.weights))
    found = run(library, cases.Inputs(inputs.x, spoiled, inputs.routing), tile_tokens=tile_tokens)
    check(found, expected(inputs, 1), bound=BOUND)
