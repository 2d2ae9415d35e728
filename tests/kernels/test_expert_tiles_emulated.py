"""Tests the CUDA kernels of the experts for many tokens, compiled for the host: their order, products and sums."""

import ctypes
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from meshserve.kernels.experts import cases

from . import emulated_experts, on_host
from .comparing import assert_has_values
from .emulated_experts import GatherArgs, Scales, Stack, TensorMap, ordered, rounded, stack, tensor_map

pytestmark = on_host.needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_experts.compiled(tmp_path_factory.mktemp("emulated"))


class TilesArgs(ctypes.Structure):
    """Mirrors the struct in wide_tiles.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "share_of", "out", "num_taken")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "box_tokens", "first_matrix")),
        ("is_permuted", ctypes.c_bool),
    ]


class NarrowTilesArgs(ctypes.Structure):
    """Mirrors the struct in narrow_tiles_memory.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "share_of", "out", "out_scales")),
        ("scales", Scales),
        *((name, ctypes.c_int) for name in ("rows", "columns", "first_row", "stride")),
        ("is_permuted", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("experts", "tokens", "token_scales", "slots")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_chosen", "num_experts")),
    ]


def first_places(counts: np.ndarray) -> np.ndarray:
    """Returns the slot of each expert's first token, for all experts that a block can have."""
    first = np.zeros(257, np.int32)
    first[1:] = np.concatenate([np.cumsum(counts), np.full(256 - len(counts), counts.sum())])
    return first


@pytest.mark.parametrize(
    ("box_tokens", "blocks", "clusters", "most"),
    [(16, 2, 1, 166), (64, 2, 2, 278), (64, 2, 1, 449), (16, 1, 2, 166), (64, 1, 3, 214)],
)
def test_tiles_are_the_float64_product(
    library: ctypes.CDLL, box_tokens: int, blocks: int, clusters: int, most: int
) -> None:
    """Several tiles of tokens for one expert, none for another, and tiles that exceed the matrices; by
    pairs of blocks and by blocks alone.

    The rows after the last token are never written, as where tokens are padding: they hold NaN.
    """
    bfloat16, num_experts, embed, mlp = ml_dtypes.bfloat16, 4, 256, 96
    first = first_places(np.array([3, 0, most, 17]))
    rng = np.random.default_rng(9)
    num_slots = first[-1]
    rows = rng.standard_normal((num_slots + 150, embed)).astype(bfloat16)
    shares = rng.random(len(rows), np.float32)
    rows[num_slots:] = shares[num_slots:] = np.nan
    gate_up = stack(rng.standard_normal((2, num_experts, 2, mlp, embed), np.float32) * embed**-0.5, False)
    down = stack(rng.standard_normal((2, num_experts, embed, mlp), np.float32) * mlp**-0.5, False)
    activated = np.full((len(rows), mlp), np.nan, bfloat16)
    outputs = np.full((len(rows), embed), np.nan, bfloat16)
    for is_down, weights, tokens, out in ((0, gate_up, rows, activated), (1, down, activated, outputs)):
        size, columns = out.shape[1], tokens.shape[1]
        input_map = tensor_map(tokens, (columns, len(tokens), 1), box_tokens)
        matrices = weights.data.size // (size * columns)
        weights_map = tensor_map(weights.data, (columns, size, matrices), 128)
        num_taken = ctypes.c_int(0)
        pointers = first.ctypes.data, shares.ctypes.data, out.ctypes.data, ctypes.addressof(num_taken)
        args = TilesArgs(*pointers, size, columns, box_tokens, matrices // 2, box_tokens == 64)
        library.tiles(is_down, blocks, clusters, *map(ctypes.byref, (weights_map, input_map, args)))
    for expert in range(num_experts):
        slots = slice(first[expert], first[expert + 1])
        gate, up = (rows[slots].astype(np.float64) @ matrix.T for matrix in gate_up.values[1, expert])
        expected = (shares[slots, None] * gate / (1 + np.exp(-gate)) * up) @ down.values[1, expert].T
        error = np.linalg.norm(outputs[slots].astype(np.float64) - expected)
        assert error <= 0.01 * np.linalg.norm(expected), expert
    assert_has_values(outputs[:num_slots])
    assert np.isnan(outputs[num_slots:].astype(np.float32)).all()


def scaled_rows(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns in float64 what `rounded` gave."""
    return numbers.astype(np.float64) * np.repeat(scales.T.astype(np.float64), 128, axis=1)


@pytest.mark.parametrize(
    ("is_fp8", "tile_tokens", "blocks", "embed", "mlp"),
    [
        (False, 16, 4, 320, 64), (False, 64, 2, 128, 192), (True, 16, 4, 384, 128), (True, 64, 2, 256, 256),
        (True, 128, 3, 384, 256), (True, 16, 4, 4352, 128),
    ],
)  # fmt: skip
def test_tiles_of_few_tokens_are_the_float64_product(
    library: ctypes.CDLL, is_fp8: bool, tile_tokens: int, blocks: int, embed: int, mlp: int
) -> None:
    """As above, in each kernel by itself. What 8-bit weights are multiplied with is rounded to e4m3 in the reference,
    too; what gate and up store must be within e4m3's rounding of it. Everything unwritten is NaN.
    """
    bfloat16, fp8, num_experts, block = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, 4, math.gcd(mlp, 128)
    first = first_places(np.array([3, 0, (20 if embed <= 384 else 2) + tile_tokens, 17]))
    rng = np.random.default_rng(9)
    num_slots, size = first[-1], first[-1] + 150
    stride = -(-size // 4) * 4
    shares = rng.random(size, np.float32)
    shares[num_slots:] = np.nan
    gate_up = stack(rng.standard_normal((2, num_experts, 2, mlp, embed), np.float32) * embed**-0.5, is_fp8)
    down = stack(rng.standard_normal((2, num_experts, embed, mlp), np.float32) * mlp**-0.5, is_fp8)
    kinds = fp8 if is_fp8 else bfloat16

    def run(is_down: int, weights: Stack, tokens: np.ndarray, scales: np.ndarray | None, out: np.ndarray) -> np.ndarray:
        padded = np.full((size, tokens.shape[1]), np.nan, kinds)
        padded[:num_slots] = tokens
        of_tokens = np.full((tokens.shape[1] // 128 or 1, stride), np.nan, np.float32)
        if scales is not None:
            of_tokens[:, :num_slots] = scales
        columns, rows = tokens.shape[1], weights.data.size // tokens.shape[1]
        out_scales = np.full((max(1, out.shape[1] // 128), stride), np.nan, np.float32)
        columns_each, is_wide = 128 // weights.data.itemsize, tile_tokens == 128

        def map_of(array: np.ndarray, num_rows: int, box_rows: int) -> TensorMap:
            if is_wide:
                return tensor_map(array, (columns, num_rows, 1), box_rows)
            sizes, box = (columns_each, num_rows, columns // columns_each), (columns_each, box_rows, 2)
            return TensorMap(array.ctypes.data, sizes, box, array.itemsize)

        maps = (TensorMap * 3)(
            map_of(weights.data, rows, 64),
            map_of(padded, size, min(tile_tokens, 64)),
            TensorMap(of_tokens.ctypes.data, (stride, len(of_tokens), 1), (tile_tokens + 4, 1, 1), 4),
        )
        pointers = (array.ctypes.data for array in (first, shares, out, out_scales))
        args = NarrowTilesArgs(*pointers, weights.scales, out.shape[1], columns, rows // 2, stride, is_wide)
        library.narrow_tiles(is_fp8, tile_tokens, is_down, blocks, maps, ctypes.byref(args))
        assert np.isnan(out[num_slots:].astype(np.float32)).all()
        return out_scales[:, :num_slots]

    rows = rng.standard_normal((num_slots, embed))
    tokens, scales = rounded(rows) if is_fp8 else (rows.astype(bfloat16), None)
    activated, outputs = np.full((size, mlp), np.nan, kinds), np.full((size, embed), np.nan, bfloat16)
    found_scales = run(0, gate_up, tokens, scales, activated)
    activated = activated[:num_slots]
    truth = scaled_rows(tokens, scales) if is_fp8 else tokens.astype(np.float64)
    found = scaled_rows(activated, found_scales) if is_fp8 else activated.astype(np.float64)
    run(1, down, activated, found_scales if is_fp8 else None, outputs)
    for expert in range(num_experts):
        slots = slice(first[expert], first[expert + 1])
        gate, up = (truth[slots] @ matrix.astype(np.float64).T for matrix in gate_up.values[1, expert])
        hidden = shares[slots, None] * gate / (1 + np.exp(-gate)) * up
        size_of = np.abs(hidden)
        largest = np.repeat(size_of.reshape(-1, mlp // block, block).max(axis=2), block, axis=1)
        nearest = 2**-4 * size_of + 2**-10 / 448 * largest if is_fp8 else 2**-8 * size_of
        assert (np.abs(found[slots] - hidden) <= 1.01 * nearest + 1e-5 * largest).all(), expert
        expected = found[slots] @ down.values[1, expert].astype(np.float64).T
        error = np.linalg.norm(outputs[slots].astype(np.float64) - expected)
        assert error <= 3e-3 * np.linalg.norm(expected), expert  # rounding to bfloat16: 1.7e-3


@pytest.mark.parametrize(
    ("is_fp8", "tile_tokens", "blocks", "mlp", "chosen_by_none"),
    [
        (True, 16, 5, 128, (0, 2)), (True, 32, 5, 256, (1,)), (True, 16, 12, 128, (3, 7)),
        (False, 16, 3, 64, (0, 1, 2)), (False, 16, 5, 192, ()),
    ],
)  # fmt: skip
def test_kernels_of_a_decode_step_find_the_places_of_the_choices(
    library: ctypes.CDLL, is_fp8: bool, tile_tokens: int, blocks: int, mlp: int, chosen_by_none: tuple[int, ...]
) -> None:
    """Experts with several tiles of tokens and with none, fewer and more blocks than tiles, and padding.

    Tokens lie in their own order. Where they are padding they hold NaN, and so does everything unwritten.
    """
    bfloat16, fp8, num_experts, num_tokens, embed = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, 8, 45, 384
    kinds, rng = fp8 if is_fp8 else bfloat16, np.random.default_rng(3)
    usable = np.setdiff1d(np.arange(num_experts), chosen_by_none)
    chosen = np.stack([rng.permutation(usable)[:3] for _ in range(num_tokens)]).astype(np.int32)
    is_padding = rng.random(num_tokens) < 0.2
    chosen[::2, 0], chosen[::2, 1], chosen[::2, 2] = usable[-1], usable[0], usable[1]
    chosen[is_padding] = -1
    order = np.argsort(np.where(chosen < 0, num_experts, chosen), axis=None, kind="stable")
    num_slots = int((chosen >= 0).sum())
    token_of = order[:num_slots] // chosen.shape[1]
    stride = -(-chosen.size // 4) * 4
    values = rng.standard_normal((num_tokens, embed))
    tokens, token_scales = np.full((num_tokens, embed), np.nan, kinds), np.full((3, stride), np.nan, np.float32)
    tokens[~is_padding] = values[~is_padding].astype(bfloat16)
    if is_fp8:
        tokens[~is_padding], token_scales[:, :num_tokens][:, ~is_padding] = rounded(values[~is_padding])
    gate_up = stack(rng.standard_normal((2, num_experts, 2, mlp, embed), np.float32) * embed**-0.5, is_fp8)
    down = stack(rng.standard_normal((2, num_experts, embed, mlp), np.float32) * mlp**-0.5, is_fp8)
    slots = np.full(chosen.shape, -7, np.int32)
    activated, outputs = np.full((chosen.size, mlp), np.nan, kinds), np.full((chosen.size, embed), np.nan, bfloat16)
    out_scales = [np.full((max(1, size // 128), stride), np.nan, np.float32) for size in (mlp, embed)]
    for is_down, weights, source, out in ((0, gate_up, tokens, activated), (1, down, activated, outputs)):
        columns = source.shape[1]
        columns_each, rows = 128 // weights.data.itemsize, weights.data.size // columns
        groups = columns // columns_each
        maps = (TensorMap * 3)(
            TensorMap(weights.data.ctypes.data, (columns_each, rows, groups), (columns_each, 64, 2), source.itemsize),
            TensorMap(
                source.ctypes.data, (columns_each, len(source), groups), (columns_each, tile_tokens, 2), source.itemsize
            ),
            TensorMap(out_scales[0].ctypes.data, (stride, len(out_scales[0]), 1), (tile_tokens + 4, 1, 1), 4),
        )
        args = NarrowTilesArgs(
            None, None, out.ctypes.data, out_scales[is_down].ctypes.data, weights.scales, out.shape[1], columns,
            rows // 2, stride, False, chosen.ctypes.data, tokens.ctypes.data, token_scales.ctypes.data,
            slots.ctypes.data, num_tokens, chosen.shape[1], num_experts,
        )  # fmt: skip
        library.narrow_tiles(is_fp8, tile_tokens, is_down, blocks, maps, ctypes.byref(args))
    np.testing.assert_array_equal(slots.ravel()[order[:num_slots]], np.arange(num_slots))
    np.testing.assert_array_equal(slots[chosen < 0], -1)
    numbers = (scaled_rows(tokens, token_scales[:, :num_tokens]) if is_fp8 else tokens.astype(np.float64))[token_of]
    found = scaled_rows(activated, out_scales[0][:, : len(activated)]) if is_fp8 else activated.astype(np.float64)
    experts = chosen.ravel()[order[:num_slots]]
    for expert in usable:
        mine = np.flatnonzero(experts == expert)
        gate, up = (numbers[mine] @ matrix.astype(np.float64).T for matrix in gate_up.values[1, expert])
        hidden = gate / (1 + np.exp(-gate)) * up
        assert np.linalg.norm(found[mine] - hidden) <= (0.04 if is_fp8 else 0.004) * np.linalg.norm(hidden), expert
        expected = found[mine] @ down.values[1, expert].astype(np.float64).T
        error = np.linalg.norm(outputs[mine].astype(np.float64) - expected)
        assert error <= 3e-3 * np.linalg.norm(expected), expert
    assert np.isnan(outputs[num_slots:].astype(np.float32)).all()


class ArrangeArgs(ctypes.Structure):
    """Mirrors the struct in permutation.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "experts shares counts first slots share_of num_taken".split()),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_chosen", "num_experts")),
    ]


class CombineArgs(ctypes.Structure):
    """Mirrors the struct in router.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "rows shares slots residual next_gain out scaled_out sums_out".split()),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_chosen", "columns")),
    ]


class Arranged(NamedTuple):
    """Choices [T, k] in order of their experts."""

    case: cases.Case
    x: np.ndarray
    chosen: np.ndarray
    shares: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    share_of: np.ndarray
    args: ArrangeArgs
    unused: tuple[np.ndarray, ...]  # which the arguments point to

    @property
    def is_here(self) -> np.ndarray:
        return (self.chosen >= 0) & (self.chosen < self.case.num_local)

    @property
    def token_of(self) -> np.ndarray:
        """The token of each slot."""
        order = np.argsort(self.slots[self.is_here])
        return np.nonzero(self.is_here)[0][order]


def arranged(library: ctypes.CDLL, num_tokens: int) -> Arranged:
    """Arranges the choices of a block of 16 of 24 experts, whose tokens' rows hold NaN where they are padding."""
    block = {"num_experts": 24, "first_expert": 4, "block_experts": 16}
    case = cases.Case(name="", num_tokens=num_tokens, padding=7, skew=0.5, **block)
    inputs = cases.make_inputs(case, seed=4)
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    counts, first = np.full((3, 256), -7, np.int32), np.full(257, -7, np.int32)
    slots = np.full(chosen.shape, -7, np.int32)
    share_of = np.full(chosen.size, np.nan, np.float32)
    num_taken = np.full(2, 7, np.int32)
    arrays = (chosen, shares, counts, first, slots, share_of, num_taken)
    args = ArrangeArgs(*(array.ctypes.data for array in arrays), case.num_tokens, case.num_chosen, case.num_local)
    library.arrange(ctypes.byref(args))
    assert not num_taken.any()
    x = np.asarray(inputs.x, ml_dtypes.bfloat16)
    unused = counts, num_taken
    return Arranged(case, x, chosen, shares, slots, first, share_of, args, unused)


@pytest.mark.parametrize("num_tokens", [200, 600])
def test_tokens_are_put_in_order_of_their_experts(library: ctypes.CDLL, num_tokens: int) -> None:
    """One and three chunks of tokens, with a norm. For 8-bit weights, the copies are rounded."""
    case, x, chosen, shares, slots, first, share_of, args, _ = found = arranged(library, num_tokens)
    is_here = found.is_here
    tokens, choices = np.nonzero(is_here)
    order = np.lexsort((tokens, chosen[is_here]))
    num_slots = is_here.sum()
    np.testing.assert_array_equal(found.token_of, tokens[order])
    np.testing.assert_array_equal(share_of[:num_slots], shares[tokens, choices][order])
    np.testing.assert_array_equal(first, np.searchsorted(chosen[is_here][order], np.arange(257)))
    np.testing.assert_array_equal(slots[~is_here], -1)
    np.testing.assert_array_equal(slots[is_here][order], np.arange(num_slots))

    rows = np.full((chosen.size, case.embed), np.nan, ml_dtypes.bfloat16)
    norm_sums = np.random.default_rng(6).random((num_tokens, 3), np.float32) + 0.5
    numbers = np.full(rows.shape, np.nan, ml_dtypes.float8_e4m3fn)
    scales = np.full((case.embed // 128, chosen.size + 4), np.nan, np.float32)

    def gather_args(tokens: np.ndarray, *, is_fp8: bool, is_ordered: bool) -> GatherArgs:
        arrays = (tokens, slots, numbers if is_fp8 else rows, scales)
        pointers = (array.ctypes.data for array in arrays)
        norm = norm_sums.ctypes.data, 3, 0.5, 0.25
        sizes = *chosen.shape, case.embed, 1 if is_ordered else 8
        return GatherArgs(*pointers, scales.shape[1], *norm, *sizes, is_ordered)

    library.scatter(False, ctypes.byref(gather_args(x, is_fp8=False, is_ordered=False)))
    normed = x.astype(np.float32) / np.sqrt(norm_sums.sum(axis=1, keepdims=True) / 2 + 0.25)
    assert_has_values(normed[found.token_of])
    np.testing.assert_allclose(rows[:num_slots].astype(np.float32), normed[found.token_of], rtol=0.005)
    expected_numbers, expected_scales = rounded(rows[:num_slots])
    before = [array.copy() for array in (first, slots, share_of, rows[:num_slots])]
    for is_fp8, is_ordered in ((True, False), (True, True), (False, False)):
        source = ordered(x) if is_ordered else x
        gather = gather_args(source, is_fp8=is_fp8, is_ordered=is_ordered)
        for is_one_kernel in (False, True) if num_tokens <= 256 else (False,):
            rows[...] = numbers[...] = scales[...] = np.nan
            if is_one_kernel:  # which also finds the slots
                first[...] = slots[...] = -7
                share_of[...] = np.nan
                library.place_and_gather(is_fp8, ctypes.byref(args), ctypes.byref(gather))
            else:
                library.scatter(is_fp8, ctypes.byref(gather))
            for array, expected in zip((first, slots, share_of), before[:3], strict=True):
                np.testing.assert_array_equal(array, expected)
            if is_fp8:
                np.testing.assert_array_equal(numbers[:num_slots], expected_numbers)
                np.testing.assert_array_equal(scales[:, :num_slots], expected_scales)
            else:
                np.testing.assert_array_equal(rows[:num_slots], before[3])
            assert np.isnan(rows[num_slots:].astype(np.float32)).all()


@pytest.mark.parametrize(("has_shares", "is_split"), [(False, False), (True, False), (True, True)])
def test_the_rows_of_a_token_are_added_up(library: ctypes.CDLL, has_shares: bool, is_split: bool) -> None:
    """The experts do nothing, but multiply by the share if the sum does not. What is left for the next layer may be two
    e4m3 numbers each, and a power of two for each 64.
    """
    case, x, _, shares, slots, _, share_of, _, _ = found = arranged(library, 200)
    num_slots = found.is_here.sum()
    rows = np.full((found.chosen.size, case.embed), np.nan, ml_dtypes.bfloat16)
    rows[:num_slots] = x[found.token_of].astype(np.float32) * (1 if has_shares else share_of[:num_slots, None])
    out, gain = np.full_like(x, 1), np.full(case.embed, 2, ml_dtypes.bfloat16)
    left = np.full(x.size * 2 + x.size // 64, 0xFF, np.uint8)
    sums = np.full((case.num_tokens, 1), np.nan, np.float32)
    pointers = (array.ctypes.data for array in (slots, out, gain, out, left, sums))
    given = shares.ctypes.data if has_shares else None
    args = CombineArgs(rows.ctypes.data, given, *pointers, case.num_tokens, case.num_chosen, case.embed)
    library.combine(is_split, ctypes.byref(args))
    expected = 1 + np.where(found.is_here, shares, 0).sum(axis=1, keepdims=True) * np.nan_to_num(x.astype(np.float32))
    assert_has_values(expected)
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.03, rtol=0.02)
    if not has_shares:  # the kernel for many tokens
        many = np.full_like(x, 1)
        args.residual = args.out = many.ctypes.data
        library.sum_rows(ctypes.byref(args))
        np.testing.assert_array_equal(many, out)
    scaled = left[: 2 * x.size].view(x.dtype).reshape(x.shape).astype(np.float32)
    if is_split:
        numbers = left[: 2 * x.size].view(ml_dtypes.float8_e4m3fn).reshape(-1, 2, 64).astype(np.float32).sum(axis=1)
        scaled = (numbers * np.exp2(left[2 * x.size :, None].astype(np.float32) - 127)).reshape(x.shape)
    error = np.abs(scaled - 2 * out.astype(np.float32)).max(axis=1)
    assert (error <= (2**-17 if is_split else 0) * np.abs(scaled).max(axis=1)).all()
    np.testing.assert_allclose(sums[:, 0], (out.astype(np.float32) ** 2).sum(axis=1), rtol=1e-5)
