"""Tests the kernels of p2p.cuh and two_shot.cuh compiled for the host, with a thread per CUDA thread.

This shows that words reach their destination in every order that the threads happen to take, but not how a GPU behaves.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compiles the kernels' source with a ptx.cuh for the host."""
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "p2p.cpp")


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def added(shares: np.ndarray) -> np.ndarray:
    """Sums over the first axis in float32, in order."""
    total = shares[0].astype(np.float32)
    for share in shares[1:]:
        total = total + share.astype(np.float32)
    return total


@pytest.mark.parametrize(("num", "pairs", "blocks"), [(2, 300, 2), (3, 128, 1), (4, 131, 1)])
def test_one_shot_all_reduce_sums_in_rank_order(library: ctypes.CDLL, num: int, pairs: int, blocks: int) -> None:
    repeats = 4
    shares = np.random.default_rng(num).standard_normal((num, repeats, 4 * pairs)).astype(BFLOAT16)
    out = np.full((num, repeats, 4 * pairs), np.nan, BFLOAT16)
    assert library.run_one_shots(num, pairs, repeats, blocks, 1, pointer(shares), pointer(out)) == 1
    for row in out:
        assert_has_values(added(shares))
        np.testing.assert_array_equal(row.view(np.uint16), added(shares).astype(BFLOAT16).view(np.uint16))


@pytest.mark.parametrize(("num", "chunk", "blocks"), [(2, 4700, 2), (2, 3, 1), (4, 1600, 1)])
def test_two_shot_all_reduce_sums_in_rank_order(library: ctypes.CDLL, num: int, chunk: int, blocks: int) -> None:
    """Runs up to ten turns per thread, with some idle threads."""
    repeats = 3
    shares = np.random.default_rng(num).standard_normal((num, repeats, num * chunk * 8)).astype(BFLOAT16)
    shares[:, :, ::9] = np.array(0xFFFF, np.uint16).view(BFLOAT16)  # looks like part of an empty slot
    shares[:, :, 8:16] = np.array(0xFFFF, np.uint16).view(BFLOAT16)
    out = np.zeros_like(shares)
    assert library.run_two_shots(num, chunk, repeats, blocks, pointer(shares), pointer(out)) == 1
    expected = added(shares)
    assert_has_values(expected)
    for row in out.astype(np.float32):
        np.testing.assert_array_equal(row, expected.astype(BFLOAT16).astype(np.float32))


def test_words_that_look_like_an_empty_slot_arrive(library: ctypes.CDLL) -> None:
    num, pairs, repeats = 3, 40, 3
    words = np.random.default_rng(5).integers(0, 2**32, (num, repeats, 2 * pairs), np.uint32)
    words[:, :, ::7] = 0xFFFFFFFF
    out = np.zeros((num, repeats, num, 2 * pairs), np.uint32)
    assert library.run_one_shots(num, pairs, repeats, 1, 0, pointer(words), pointer(out)) == 1
    expected = np.where(words == 0xFFFFFFFF, 0x7FFF7FFF, words).swapaxes(0, 1)
    for row in out:
        np.testing.assert_array_equal(row, expected)


def split(rows: np.ndarray, batch: int, columns: int) -> np.ndarray:
    """Returns what split activations (weight_formats.cuh) stand for."""
    numbers, exponents = rows[: batch * columns * 2].view(ml_dtypes.float8_e4m3fn), rows[batch * columns * 2 :]
    pairs = numbers.reshape(batch, columns // 64, 2, 64).astype(np.float32).sum(axis=2)
    powers = 2.0 ** (exponents.reshape(batch, columns // 64, 1).astype(np.float32) - 127)
    return (pairs * powers).reshape(batch, columns)


@pytest.mark.parametrize("is_split", [False, True], ids=["bfloat16", "split"])
@pytest.mark.parametrize(("num", "batch", "columns", "blocks"), [(2, 1, 256, 1), (4, 3, 128, 1), (2, 5, 384, 2)])
def test_gather_writes_the_inputs_of_the_next_projection(
    library: ctypes.CDLL, num: int, batch: int, columns: int, blocks: int, is_split: bool
) -> None:
    rounds, draw = 5, np.random.default_rng(batch)
    shares = draw.standard_normal((num, rounds, batch, columns)).astype(BFLOAT16)
    start = draw.standard_normal((batch, columns)).astype(BFLOAT16)
    gain = draw.standard_normal(columns).astype(BFLOAT16)
    x, scaled = np.stack([start] * num), np.full((num, batch * (columns * 2 + columns // 64)), 0xFF, np.uint8)
    sums = np.full((num, batch, columns // 128), np.nan, np.float32)
    arrays = [pointer(array) for array in (shares, x, gain, scaled)]
    arguments = (*arrays, scaled.shape[1], pointer(sums), int(is_split))
    assert library.run_gathers(num, rounds, batch, columns, blocks, *arguments) == 1
    expected = start
    for round_shares in shares.swapaxes(0, 1):
        expected = (expected.astype(np.float32) + added(round_shares)).astype(BFLOAT16)
    wide = expected.astype(np.float32)
    assert_has_values(wide)
    for rank in range(num):
        np.testing.assert_array_equal(x[rank].view(np.uint16), expected.view(np.uint16))
        scaled_up = wide * gain.astype(np.float32)
        if is_split:
            most = np.abs(scaled_up).reshape(batch, -1, 64).max(axis=2).repeat(64, axis=1)
            error = np.abs(split(scaled[rank], batch, columns) - scaled_up)
            assert (error <= 2.0**-8 * np.abs(scaled_up) + 2.0**-17 * most).all()
        else:
            found = scaled[rank][: batch * columns * 2].view(np.uint16).reshape(batch, columns)
            np.testing.assert_array_equal(found, scaled_up.astype(BFLOAT16).view(np.uint16))
        squares = (wide.reshape(batch, -1, 128) ** 2).sum(axis=2)
        np.testing.assert_allclose(sums[rank], squares, rtol=1e-5)
