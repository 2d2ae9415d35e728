"""Tests the CUDA kernels of the experts that use no tensor maps and clusters, compiled for the host.

Each of 256 CUDA threads is a host thread, and a misaligned access ends the process.
"""

import ctypes

import jax
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
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in ("residual", "next_gain", "scaled_out", "sums_out")),
    ]


def arguments(sizes: dict[str, int], **arrays: np.ndarray) -> Args:
    return Args(**sizes, **{name: array.ctypes.data for name, array in arrays.items()})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    sources = ("expert_choices.cuh", "expert_rows.cuh", "expert_router.cuh")
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    return on_host.compiled(folder, "emulated", "expert_rows.cpp", *sources, flags=flags)


CASES = (
    cases.Case(name="one-token", num_tokens=1, num_experts=8, mlp=32, embed=128),
    cases.Case(name="padding", num_tokens=7, padding=3, num_experts=6, num_chosen=2, mlp=64),
    cases.Case(name="a-block", num_tokens=8, num_experts=5, num_chosen=3, mlp=32, first_expert=1, block_experts=3),
    cases.Case(name="nobody", num_tokens=3, padding=1, num_experts=4, num_chosen=2, mlp=32),
    cases.Case(name="long-rows", num_tokens=2, num_experts=3, num_chosen=1, mlp=32, embed=1408),
    cases.Case(name="long-rows-down", num_tokens=8, num_experts=3, num_chosen=2, mlp=288),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("blocks", [1, 5])
def test_rows_are_the_reference(library: ctypes.CDLL, case: cases.Case, blocks: int) -> None:
    """Computes an RMSNorm's scale, gate and up, down, and the sums over experts; everything unwritten is NaN."""
    bfloat16 = ml_dtypes.bfloat16
    inputs = cases.make_inputs(case, seed=1)
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    x, gate_up, down = (np.asarray(array, bfloat16) for array in (inputs.x, *inputs.weights))
    num_tokens, embed = case.num_tokens, case.embed
    sums = np.abs(np.random.default_rng(2).standard_normal((num_tokens, 4), np.float32)) + 1
    sizes = {"num_tokens": num_tokens, "num_chosen": case.num_chosen, "num_experts": case.num_local}
    common = {"experts": chosen, "shares": shares}
    activated = np.full((chosen.size, case.mlp), np.nan, bfloat16)
    args = arguments(
        sizes | {"rows": case.mlp, "columns": embed, "norm_tiles": 4, "inverse_dim": 1 / 16, "epsilon": 0.5},
        input=x, weights=gate_up[1], sums=sums, out=activated, **common,
    )  # fmt: skip
    library.gate_up(blocks, ctypes.byref(args))

    sizes |= {"rows": embed, "columns": case.mlp}
    residual = np.random.default_rng(3).standard_normal((num_tokens, embed)).astype(bfloat16)
    found, scaled, gain = residual.copy(), np.full_like(residual, np.nan), np.full(embed, 2.0, bfloat16)
    squares = np.full((num_tokens, embed // 16), np.nan, np.float32)
    common |= {"input": activated, "weights": down[1], "residual": found, "out": found, "next_gain": gain}
    library.down(ctypes.byref(arguments(sizes, scaled_out=scaled, sums_out=squares, **common)))
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


class ArrangeArgs(ctypes.Structure):
    """Mirrors the struct in expert_choices.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "experts shares counts first places token_of share_of".split()),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_chosen", "num_experts")),
    ]


class GatherArgs(ctypes.Structure):
    """Mirrors the struct in expert_router.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "token_of", "num_places", "rows", "sums")),
        *_NORM,
        ("columns", ctypes.c_int),
    ]


class CombineArgs(ctypes.Structure):
    """Mirrors the struct in expert_router.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "rows places residual next_gain out scaled_out sums_out".split()),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_chosen", "columns")),
    ]


@pytest.mark.parametrize("num_tokens", [200, 600])
def test_tokens_are_put_in_order_of_their_experts_and_added_up(library: ctypes.CDLL, num_tokens: int) -> None:
    """One and three chunks of tokens, with a norm; the experts do nothing but multiply by the share."""
    block = {"num_experts": 24, "first_expert": 4, "block_experts": 16}
    case = cases.Case(name="", num_tokens=num_tokens, padding=7, skew=0.5, **block)
    inputs, bfloat16 = cases.make_inputs(case, seed=4), ml_dtypes.bfloat16
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    x = np.asarray(inputs.x, bfloat16)
    is_here = (chosen >= 0) & (chosen < case.num_local)
    counts, first = np.full((3, 256), -7, np.int32), np.full(257, -7, np.int32)
    places, token_of = np.full(chosen.shape, -7, np.int32), np.full(chosen.size, -7, np.int32)
    share_of = np.full(chosen.size, np.nan, np.float32)
    arrays = (chosen, shares, counts, first, places, token_of, share_of)
    args = ArrangeArgs(*(array.ctypes.data for array in arrays), case.num_tokens, case.num_chosen, case.num_local)
    library.arrange(ctypes.byref(args))
    tokens, slots = np.nonzero(is_here)
    order = np.lexsort((tokens, chosen[is_here]))
    num_places = is_here.sum()
    np.testing.assert_array_equal(token_of[:num_places], tokens[order])
    np.testing.assert_array_equal(share_of[:num_places], shares[tokens, slots][order])
    np.testing.assert_array_equal(first, np.searchsorted(chosen[is_here][order], np.arange(257)))
    np.testing.assert_array_equal(places[~is_here], -1)
    np.testing.assert_array_equal(places[is_here][order], np.arange(num_places))

    rows = np.full((chosen.size, case.embed), np.nan, bfloat16)
    norm_sums = np.random.default_rng(6).random((num_tokens, 3), np.float32) + 0.5
    arrays = (x, token_of, first[256:], rows, norm_sums)
    numbers = (3, 0.5, 0.25, case.embed)
    library.gather(5, ctypes.byref(GatherArgs(*(array.ctypes.data for array in arrays), *numbers)))
    normed = x.astype(np.float32) / np.sqrt(norm_sums.sum(axis=1, keepdims=True) / 2 + 0.25)
    np.testing.assert_allclose(rows[:num_places].astype(np.float32), normed[token_of[:num_places]], rtol=0.005)

    rows = (rows * share_of[:, None]).astype(bfloat16)
    out, scaled, gain = np.full_like(x, 1), np.full_like(x, np.nan), np.full(case.embed, 2, bfloat16)
    sums = np.full((case.num_tokens, 1), np.nan, np.float32)
    arrays = (rows, places, out, gain, out, scaled, sums)
    sizes = (case.num_tokens, case.num_chosen, case.embed)
    library.combine(ctypes.byref(CombineArgs(*(array.ctypes.data for array in arrays), *sizes)))
    total = np.where(is_here, shares, 0).sum(axis=1, keepdims=True)
    expected = 1 + total * np.nan_to_num(normed)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.03, rtol=0.02)
    np.testing.assert_array_equal(scaled.astype(np.float32), 2 * out.astype(np.float32))
    np.testing.assert_allclose(sums[:, 0], (out.astype(np.float32) ** 2).sum(axis=1), rtol=1e-5)


class RouterArgs(ctypes.Structure):
    """Mirrors the struct in expert_router.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scaled", "router", "sums", "positions")),
        *_NORM,
        *((name, ctypes.c_int) for name in ("num_tokens", "num_experts", "num_chosen", "columns")),
        ("is_normalized", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("experts", "shares")),
    ]


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(128, 8), (8, 1), (40, 6)])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_router_chooses_the_best(
    library: ctypes.CDLL, num_experts: int, num_chosen: int, is_normalized: bool
) -> None:
    """Among equal scores the lower expert comes first; padding chooses none."""
    scores = np.full((5, 128), np.nan, np.float32)
    scores[:, :num_experts] = 2 * np.random.default_rng(5).standard_normal((5, num_experts))
    scores[2, :num_experts], scores[3, 1:num_experts:2] = -1.0, 3.0
    positions = np.array([0, 5, 9, 1, -1], np.int32)
    chosen, shares = np.full((5, num_chosen), -7, np.int32), np.full((5, num_chosen), np.nan, np.float32)
    pointers = (array.ctypes.data for array in (scores, positions))
    args = RouterArgs(
        0, 0, *pointers, 0, 0.0, 0.0, 5, num_experts, num_chosen, 0, is_normalized, chosen.ctypes.data,
        shares.ctypes.data,
    )  # fmt: skip
    library.choose(ctypes.byref(args))
    expected, experts = jax.lax.top_k(jax.nn.softmax(0.5 * scores[:, :num_experts], axis=-1), num_chosen)
    if is_normalized:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(chosen[:4], experts[:4])
    np.testing.assert_array_equal(chosen[4], -1)
    np.testing.assert_allclose(shares[:4], expected[:4], rtol=1e-5)
