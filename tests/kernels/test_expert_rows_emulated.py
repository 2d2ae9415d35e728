"""Tests the CUDA kernels of the experts for few tokens, and the router, compiled for the host."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from meshserve.kernels.experts import cases, reference
from meshserve.kernels.router import RouterOptions
from meshserve.kernels.router.reference import choose

from . import emulated_experts, on_host
from .comparing import assert_has_values
from .emulated_experts import NORM, SCALE_TYPES, GatherArgs, Scales, Stack, ordered, rounded, stack, tensor_map

pytestmark = on_host.needs_compiler

_SIZES = ("num_tokens", "num_chosen", "num_experts", "rows", "columns")


def normalized(num_chosen: int) -> RouterOptions:
    return RouterOptions(num_chosen=num_chosen, is_normalized=True)


class Args(ctypes.Structure):
    """Mirrors the struct in row_products.cuh."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("scales", Scales),
        ("first_row", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("experts", "shares", "sums")),
        *NORM,
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in _SIZES),
        ("is_ordered", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("residual", "next_gain", "scaled_out", "sums_out")),
        ("scores", ctypes.c_void_p),
        ("num_parts", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("positions", "chosen")),
        ("is_normalized", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("published", "unpublished")),
    ]


def arguments(sizes: dict[str, int], **arrays: np.ndarray) -> Args:
    return Args(**sizes, **{name: array.ctypes.data for name, array in arrays.items()})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_experts.compiled(tmp_path_factory.mktemp("emulated"))


CASES = (
    cases.Case(name="one-token", num_tokens=1, num_experts=8, mlp=32),
    cases.Case(name="padding", num_tokens=7, padding=3, num_experts=6, num_chosen=2, mlp=64),
    cases.Case(name="a-block", num_tokens=8, num_experts=5, num_chosen=3, mlp=32, first_expert=1, block_experts=3),
    cases.Case(name="nobody", num_tokens=3, padding=1, num_experts=4, num_chosen=2, mlp=32),
    cases.Case(name="one-expert-each", num_tokens=2, num_experts=3, num_chosen=1, mlp=32),
    cases.Case(name="long-rows-down", num_tokens=8, num_experts=3, num_chosen=2, mlp=288),
)


@pytest.mark.parametrize(
    ("case", "is_fp8", "blocks", "kind", "embed"),
    [
        *((case, is_fp8, 3 if is_fp8 else 1, 0, 2048) for case in CASES for is_fp8 in (False, True)),
        (CASES[1], True, 2, 1, 2048),
        *((CASES[2], is_fp8, 4, 0, 4096) for is_fp8 in (False, True)),
    ],
    ids=lambda value: value.name if isinstance(value, cases.Case) else str(value),
)
def test_rows_are_the_reference(
    library: ctypes.CDLL, case: cases.Case, is_fp8: bool, blocks: int, kind: int, embed: int
) -> None:
    """Computes an RMSNorm's scale, gate and up, down, and the sums over experts; everything unwritten is NaN."""
    case = dataclasses.replace(case, mlp=(4 if is_fp8 else 1) * case.mlp, embed=embed)
    bfloat16 = ml_dtypes.bfloat16
    inputs = cases.make_inputs(case, seed=1)
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    x = np.asarray(inputs.x, bfloat16)
    kinds = (SCALE_TYPES[kind], SCALE_TYPES[2 * kind])
    gate_up, down = (stack(np.asarray(array), is_fp8, kind) for array, kind in zip(inputs.weights, kinds, strict=True))
    num_tokens = case.num_tokens

    def run(kernel: str, weights: Stack, args: Args, *blocks: int) -> None:
        columns = weights.data.shape[-1]
        weights_map = tensor_map(weights.data, (columns, weights.data.size // columns, 1), 16)
        getattr(library, kernel)(is_fp8, *blocks, ctypes.byref(weights_map), ctypes.byref(args))

    sums = np.abs(np.random.default_rng(2).standard_normal((num_tokens, 4), np.float32)) + 1
    sizes = {"num_tokens": num_tokens, "num_chosen": case.num_chosen, "num_experts": case.num_local}
    common = {"experts": chosen, "shares": shares}
    activated = np.full((chosen.size, case.mlp), np.nan, bfloat16)
    is_ordered = is_fp8 and case.num_tokens % 2 == 1
    tokens = ordered(x) if is_ordered else x
    norm = {"norm_tiles": 4, "inverse_dim": 1 / 16, "epsilon": 0.5, "is_ordered": is_ordered}
    row = {"first_row": case.num_local * 2 * case.mlp, "rows": case.mlp, "columns": embed, "scales": gate_up.scales}
    args = arguments(
        sizes | norm | row, input=tokens, sums=sums, out=activated,
        **common,
    )  # fmt: skip
    run("gate_up", gate_up, args, blocks)

    sizes |= {"first_row": case.num_local * embed, "rows": embed, "columns": case.mlp, "scales": down.scales}
    residual = np.random.default_rng(3).standard_normal((num_tokens, embed)).astype(bfloat16)
    found, scaled, gain = residual.copy(), np.full_like(residual, np.nan), np.full(embed, 2.0, bfloat16)
    squares = np.full((num_tokens, embed // 16), np.nan, np.float32)
    common |= {"input": activated, "residual": found, "out": found, "next_gain": gain}
    run("down", down, arguments(sizes, scaled_out=scaled, sums_out=squares, **common))
    twice = (2 * found.astype(np.float32)).astype(bfloat16)
    np.testing.assert_array_equal(scaled, ordered(twice) if is_fp8 else twice)
    expected_squares = (found.astype(np.float32) ** 2).reshape(num_tokens, -1, 16).sum(axis=-1)
    np.testing.assert_allclose(squares, expected_squares, rtol=1e-5)

    normed = x.astype(np.float32) / np.sqrt(sums.sum(axis=1, keepdims=True) / 16 + 0.5)
    weights = inputs.weights._replace(gate_up=jnp.asarray(gate_up.values), down=jnp.asarray(down.values))
    experts = jax.jit(reference.experts, static_argnames=("layer", "num_experts"))
    expected = experts(jnp.asarray(normed), weights, inputs.routing, layer=1, num_experts=case.num_experts)
    expected = residual.astype(np.float32) + np.asarray(expected)
    assert_has_values(expected)
    np.testing.assert_allclose(found.astype(np.float32), expected, atol=0.02 * np.abs(expected).max(), rtol=0.02)


@pytest.mark.parametrize(("num_chosen", "columns"), [(8, 768), (3, 2432), (1, 128)])
def test_down_of_one_token_splits_activations(library: ctypes.CDLL, num_chosen: int, columns: int) -> None:
    """Its result has the accuracy of bfloat16, whatever the number of rounds through the pipelines; activations
    have the spread of a power of two for each 64 columns."""
    rng, rows, bfloat16 = np.random.default_rng(12), 32, ml_dtypes.bfloat16
    experts = rng.permutation(9)[None, :num_chosen].astype(np.int32)
    weights = stack(rng.standard_normal((1, 9, rows, columns)) * columns**-0.5, is_fp8=True)
    spread = np.exp2(rng.integers(-9, 9, (num_chosen, columns // 64)).repeat(64, axis=1))
    activated = (rng.standard_normal((num_chosen, columns)) * spread).astype(bfloat16)
    shares, out = np.ones(num_chosen, np.float32), np.full((1, rows), np.nan, np.float32).astype(bfloat16)
    args = arguments(
        {"num_tokens": 1, "num_chosen": num_chosen, "num_experts": 9, "rows": rows, "columns": columns},
        experts=experts, shares=shares, input=activated, out=out,
    )  # fmt: skip
    args.scales = weights.scales
    weights_map = tensor_map(weights.data, (columns, weights.data.size // columns, 1), 16)
    library.down(True, ctypes.byref(weights_map), ctypes.byref(args))
    values = weights.values[0, experts[0]].astype(np.float64)
    expected = np.einsum("erc,ec->r", values, activated.astype(np.float64))
    assert_has_values(expected)
    error = np.linalg.norm(out[0].astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < 4e-3


def test_the_routers_weights_get_the_order_of_the_tokens(library: ctypes.CDLL) -> None:
    weights = np.random.default_rng(10).standard_normal(256).astype(ml_dtypes.bfloat16)
    row = weights.copy()
    library.reorder(row.ctypes.data_as(ctypes.c_void_p))
    assert_has_values(weights)
    np.testing.assert_array_equal(row, ordered(weights))


class RouterPart(ctypes.Structure):
    """Mirrors the struct in router_parts.cuh."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("router", "scores")), ("num_experts", ctypes.c_int)]


@pytest.mark.parametrize(
    ("is_fp8", "tokens", "splits", "num_experts", "first"),
    [
        (False, 5, 4, 20, 3),
        (True, 5, 1, 20, 3),
        (True, 1, 3, 128, 3),
        (True, 1, 1, 20, -1),
        (False, 1, 1, 128, 3),
        (False, 8, 8, 128, 3),
    ],
)
def test_scores_and_the_kernels_that_choose_by_them(
    library: ctypes.CDLL, is_fp8: bool, tokens: int, splits: int, num_experts: int, first: int
) -> None:
    """The router's products with tokens, in parts; gate and up, and down, choose the same experts by them. `first` is
    the first token's position.
    """
    bfloat16, num_chosen, embed, mlp = ml_dtypes.bfloat16, 3, 2048, 128
    rng = np.random.default_rng(11)
    x = rng.standard_normal((tokens, embed)).astype(bfloat16)
    router = (rng.standard_normal((num_experts, embed)) * embed**-0.5).astype(bfloat16)
    sums = np.abs(rng.standard_normal((tokens, 4), np.float32)) + 1
    positions = np.array([first, 0, -1, 7, 1, 5, 6, 8], np.int32)[:tokens]
    parts = embed // 128
    scores = np.full((tokens, parts, 128), np.nan, np.float32)
    row = ordered(x) if is_fp8 else x
    norm = (4, 1 / 16, 0.5)
    part = RouterPart(router.ctypes.data, scores.ctypes.data, num_experts)
    library.score(x.ctypes.data_as(ctypes.c_void_p), tokens, embed, splits, ctypes.byref(part))
    x_parts, router_parts = (array.astype(np.float32).reshape(-1, parts, 128) for array in (x, router))
    expected = np.einsum("tpd,epd->tpe", x_parts, router_parts)
    assert_has_values(expected)
    np.testing.assert_allclose(scores[:, :, :num_experts], expected, rtol=1e-3, atol=1e-4)

    normed_scores = scores.sum(axis=1) / np.sqrt(sums.sum(axis=1, keepdims=True) / 16 + 0.5)
    experts, shares = map(np.asarray, choose(normed_scores[:, :num_experts], normalized(num_chosen)))
    experts = np.where(positions[:, None] < 0, -1, experts).astype(np.int32)
    numbers = rng.standard_normal((1 << 16) + 1, np.float32)  # repeated, because drawing all takes long
    gate_up = stack(np.resize(numbers, (1, num_experts, 2, mlp, embed)) * embed**-0.5, is_fp8)
    down = stack(np.resize(numbers, (1, num_experts, embed, mlp)) * mlp**-0.5, is_fp8)
    results, published = [], np.repeat(np.array([[0], [7]], np.int32), num_chosen, axis=1)
    for choice in ({"experts": experts, "shares": shares}, {"scores": scores, "positions": positions}):
        activated = np.full((tokens * num_chosen, mlp), np.nan, bfloat16)
        out, chosen = np.full((tokens, embed), np.nan, bfloat16), np.full_like(experts, -7)
        sizes = {"num_tokens": tokens, "num_chosen": num_chosen, "num_experts": num_experts, "is_normalized": True}
        for name, weights, source, to in (("gate_up", gate_up, row, activated), ("down", down, activated, out)):
            columns = source.shape[1]
            args = Args(
                **sizes, **dict(zip(("norm_tiles", "inverse_dim", "epsilon"), norm, strict=True)), is_ordered=is_fp8,
                rows=to.shape[1], columns=columns, scales=weights.scales, input=source.ctypes.data, out=to.ctypes.data,
                sums=sums.ctypes.data, chosen=chosen.ctypes.data, num_parts=parts,
                published=published[0].ctypes.data, unpublished=published[1].ctypes.data,
                **{key: array.ctypes.data for key, array in choice.items()},
            )  # fmt: skip
            weights_map = tensor_map(weights.data, (columns, weights.data.size // columns, 1), 16)
            blocks = (2,) if name == "gate_up" else ()
            getattr(library, name)(is_fp8, *blocks, ctypes.byref(weights_map), ctypes.byref(args))
        results.append(out.astype(np.float32))
    np.testing.assert_array_equal(chosen, experts)
    if is_fp8 and tokens == 1:  # gate and up tell down its choices, and clear those of the next layer
        expected = np.where(experts[0] < 0, -1, experts[0] + 1)
        np.testing.assert_array_equal(published, [expected, 0 * expected])
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[1], results[0], rtol=0.02, atol=0.02)


class RouterArgs(ctypes.Structure):
    """Mirrors the struct in router.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scaled", "router", "sums", "positions")),
        *NORM,
        *((name, ctypes.c_int) for name in ("num_tokens", "num_experts", "num_chosen", "columns")),
        ("is_normalized", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("experts", "shares")),
        ("normed", GatherArgs),
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
    options = RouterOptions(num_chosen=num_chosen, is_normalized=is_normalized)
    experts, expected = choose(0.5 * scores[:, :num_experts], options)
    np.testing.assert_array_equal(chosen[:4], experts[:4])
    np.testing.assert_array_equal(chosen[4], -1)
    assert_has_values(expected[:4])
    np.testing.assert_allclose(shares[:4], expected[:4], rtol=1e-5)


@pytest.mark.parametrize(("num_tokens", "num_experts", "is_fp8"), [(9, 128, False), (21, 40, True)])
def test_the_blocks_of_the_router_exchange_their_scores(
    library: ctypes.CDLL, num_tokens: int, num_experts: int, is_fp8: bool
) -> None:
    """Each token's scores come from all blocks of its cluster; rows of padding hold NaN, which no other token sees. The
    router leaves normed tokens, which are rounded for 8-bit weights.
    """
    rng, columns, num_chosen, bfloat16 = np.random.default_rng(8), 512, 6, ml_dtypes.bfloat16
    x, router = (rng.integers(-8, 9, (rows, columns)) / 8 for rows in (num_tokens, num_experts))  # sums are exact
    positions = np.arange(num_tokens, dtype=np.int32)
    positions[::4], x[::4] = -1, np.nan
    scaled, weights = (ordered(x) if is_fp8 else x).astype(bfloat16), router.astype(bfloat16)
    sums = np.where(positions < 0, np.nan, 1.0)[:, None] * rng.uniform(1, 2, (num_tokens, 4))
    sums = sums.astype(np.float32)
    chosen = np.full((num_tokens, num_chosen), -7, np.int32)
    shares = np.full((num_tokens, num_chosen), np.nan, np.float32)
    rows = np.full(x.shape, np.nan, ml_dtypes.float8_e4m3fn if is_fp8 else bfloat16)
    scales = np.full((columns // 128, num_tokens + 3), np.nan, np.float32)
    normed = GatherArgs(
        rows=rows.ctypes.data, scales=scales.ctypes.data, stride=num_tokens + 3, columns=columns, is_ordered=is_fp8
    )
    pointers = (array.ctypes.data for array in (scaled, weights, sums, positions))
    args = RouterArgs(
        *pointers, 4, 0.01, 1.0, num_tokens, num_experts, num_chosen, columns, True, chosen.ctypes.data,
        shares.ctypes.data, normed,
    )  # fmt: skip
    library.route(is_fp8, ctypes.byref(args))
    is_real = positions >= 0
    scores = (x @ router.T)[is_real]
    inverse_rms = 1 / np.sqrt(sums[is_real].sum(axis=1, keepdims=True) * 0.01 + 1.0)
    experts, expected = choose(scores.astype(np.float32) * inverse_rms, normalized(num_chosen))
    np.testing.assert_array_equal(chosen[~is_real], -1)
    np.testing.assert_array_equal(chosen[is_real], experts)
    assert_has_values(expected)
    np.testing.assert_allclose(shares[is_real], expected, rtol=1e-4)
    expected_rows = (x[is_real].astype(np.float32) * inverse_rms.astype(np.float32)).astype(bfloat16)
    if is_fp8:
        numbers, expected_scales = rounded(expected_rows)
        found = scales[:, :num_tokens][:, is_real] * rows[is_real].astype(np.float32).reshape(-1, columns // 128, 128).T
        expected_rows = expected_scales * numbers.astype(np.float32).reshape(-1, columns // 128, 128).T
        np.testing.assert_allclose(found, expected_rows, rtol=0.13, atol=0.01)  # a last bit of bfloat16 may differ
    else:
        np.testing.assert_allclose(rows[is_real].astype(np.float32), expected_rows.astype(np.float32), rtol=0.008)
