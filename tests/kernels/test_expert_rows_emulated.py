"""Tests kernels/cuda/expert_rows.cuh compiled for the host, where each of 256 CUDA threads is a host thread."""

import ctypes

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from meshserve.kernels.experts import cases, reference

from . import on_host

pytestmark = on_host.needs_compiler

_POINTERS = ("input", "weights", "experts", "shares", "sums")
_NORM = (("norm_tiles", ctypes.c_int), ("inverse_dim", ctypes.c_float), ("epsilon", ctypes.c_float))
_SIZES = ("num_tokens", "num_chosen", "num_experts", "rows", "columns")


class Args(ctypes.Structure):
    """Mirrors the struct in expert_rows.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *_NORM,
        *((name, ctypes.c_void_p) for name in ("out", "places")),
        *((name, ctypes.c_int) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in ("residual", "next_gain", "scaled_out", "sums_out")),
    ]


def arguments(sizes: dict[str, int], **arrays: np.ndarray) -> Args:
    return Args(**sizes, **{name: array.ctypes.data for name, array in arrays.items()})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    return on_host.compiled(folder, "emulated", "expert_rows.cpp", "expert_choices.cuh", "expert_rows.cuh")


CASES = (
    cases.Case(name="one-token", num_tokens=1, num_experts=8, mlp=32, embed=128),
    cases.Case(name="few-and-padding", num_tokens=7, padding=3, num_experts=6, num_chosen=2, mlp=64),
    cases.Case(name="two-groups", num_tokens=16, num_experts=5, num_chosen=3, mlp=32, first_expert=1, block_experts=3),
    cases.Case(name="results-added-up-later", num_tokens=40, num_experts=4, num_chosen=2, mlp=96, skew=1.0),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("blocks", [1, 5])
def test_rows_are_the_reference(library: ctypes.CDLL, case: cases.Case, blocks: int) -> None:
    """Computes an RMSNorm's scale, gate and up, down, and the sums over experts; everything unwritten is NaN."""
    bfloat16 = ml_dtypes.bfloat16
    inputs = cases.make_inputs(case, seed=1)
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    x, gate_up, down = (np.asarray(array, bfloat16) for array in (inputs.x, *inputs.weights))
    num_tokens, num_choices, embed = case.num_tokens, chosen.size, case.embed
    sums = np.abs(np.random.default_rng(2).standard_normal((num_tokens, 4), np.float32)) + 1
    sizes = {"num_tokens": num_tokens, "num_chosen": case.num_chosen, "num_experts": case.num_local}
    common = {"experts": chosen, "shares": shares}
    activated = np.full((num_choices, case.mlp), np.nan, bfloat16)
    places = np.full(chosen.shape, -7, np.int32)
    args = arguments(
        sizes | {"rows": case.mlp, "columns": embed, "norm_tiles": 4, "inverse_dim": 1 / 16, "epsilon": 0.5},
        input=x, weights=gate_up[1], sums=sums, out=activated, places=places, **common,
    )  # fmt: skip
    library.gate_up(int(num_tokens <= 8), blocks, ctypes.byref(args))

    sizes |= {"rows": embed, "columns": case.mlp}
    common |= {"input": activated, "weights": down[1]}
    residual = np.random.default_rng(3).standard_normal((num_tokens, embed)).astype(bfloat16)
    if num_tokens > 16:
        rows = np.full((num_choices, embed), np.nan, bfloat16)
        library.down(blocks, ctypes.byref(arguments(sizes, out=rows, **common)))
        terms = np.where(places[..., None] < 0, 0.0, rows[places].astype(np.float32))
        found = residual.astype(np.float32) + terms.sum(axis=1)
    else:
        found, scaled, gain = residual.copy(), np.full_like(residual, np.nan), np.full(embed, 2.0, bfloat16)
        squares = np.full((num_tokens, embed // 16), np.nan, np.float32)
        extra = {"residual": found, "out": found, "next_gain": gain, "scaled_out": scaled, "sums_out": squares}
        library.down_added(int(num_tokens <= 8), ctypes.byref(arguments(sizes, **common, **extra)))
        np.testing.assert_array_equal(scaled.astype(np.float32), 2 * found.astype(np.float32))
        expected_squares = (found.astype(np.float32) ** 2).reshape(num_tokens, -1, 16).sum(axis=-1)
        np.testing.assert_allclose(squares, expected_squares, rtol=1e-5)

    normed = x.astype(np.float32) / np.sqrt(sums.sum(axis=1, keepdims=True) / 16 + 0.5)
    weights = inputs.weights._replace(
        gate_up=jnp.asarray(gate_up.astype(np.float32)), down=jnp.asarray(down.astype(np.float32))
    )
    expected = reference.experts(jnp.asarray(normed), weights, inputs.routing, layer=1, num_experts=case.num_experts)
    np.testing.assert_allclose(
        found.astype(np.float32), residual.astype(np.float32) + np.asarray(expected), atol=0.02, rtol=0.02
    )
