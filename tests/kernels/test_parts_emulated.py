"""Tests prefill_parts.cuh compiled for the host: long contexts are split and merged correctly.

The parts are those of `plan_parts`. Blocks of concurrent threads leave partial results, and the last block merges them.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from meshserve.kernels.paged_attention import cases
from meshserve.kernels.paged_attention.tiles import most_slots, plan_parts

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler
NUM_SHARES = 16
EXP2 = ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "y = std::exp2(x);")


class Args(ctypes.Structure):
    """Mirrors the struct in prefill_parts.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in "parts page_table positions out unmerged sums next_item num_arrived".split()
        ),
        *((name, ctypes.c_int) for name in "num_tokens num_parts max_pages page_size kv_heads group".split()),
        *((name, ctypes.c_int) for name in "tile_tokens slot_rows box_tokens".split()),
        ("scale_log2", ctypes.c_float),
        ("page_inverse", ctypes.c_uint32),
    ]


class Inputs(ctypes.Structure):
    """Mirrors the struct in emulated/parts.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in "qkv"), ("max_keys", ctypes.c_int)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    replaced = [("attention/prefill_parts.cuh", *EXP2)]
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "parts.cpp", replaced=replaced)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, scale: float) -> np.ndarray:
    """Returns the attention of one token, [K, G, H] float64, from q [K, G, H] and k and v [keys, K, H]."""
    scores = np.einsum("kgh,nkh->kgn", q, k[: position + 1]) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("kgn,nkh->kgh", weights / weights.sum(axis=-1, keepdims=True), v[: position + 1])


@pytest.mark.parametrize("num_blocks", [1, 5])
@pytest.mark.parametrize(
    ("requests", "group", "head_dim"),
    [
        (((1, 1024), (1, 2047), (1, 100)), 4, 64),
        (((20, 1300), (1, 1025)), 4, 64),  # 80 rows use both warpgroups
        (((3, 1100),), 5, 128),  # fewer tokens than a tile can hold
    ],
    ids=str,
)
def test_what_parts_leave_behind_is_the_attention_over_all_keys(library, requests, group, head_dim, num_blocks):
    case = cases.Case(name="", requests=requests, kv_heads=2, group=group)
    batch = cases.make_inputs(case, seed=0).batch
    positions, token_request = np.asarray(batch.positions), np.asarray(batch.token_request)
    tile_tokens, num_tokens = 128 // group, len(positions)
    parts = np.asarray(plan_parts(batch, tile_tokens=tile_tokens, num_shares=NUM_SHARES))
    assert parts[:, 5].max() > 1

    rng = np.random.default_rng(1)
    max_keys = max(total for _, total in requests)
    q = rng.standard_normal((num_tokens, 2, group, head_dim), np.float32)
    k, v = rng.standard_normal((2, len(requests), max_keys, 2, head_dim), np.float32)
    slots, slot_rows = most_slots(NUM_SHARES), min(num_tokens, tile_tokens) * group
    out = np.full(q.shape, np.nan, ml_dtypes.bfloat16)
    unmerged = np.full((slots, 2, slot_rows, head_dim + 4), np.nan, np.float32)
    sums = np.full(q.shape[:3], np.nan, np.float32)
    num_arrived = np.zeros((slots, 2, 2), np.int32)
    scale = head_dim**-0.5
    arguments = Args(
        parts=parts.ctypes.data, out=out.ctypes.data, unmerged=unmerged.ctypes.data, sums=sums.ctypes.data,
        num_arrived=num_arrived.ctypes.data, num_tokens=num_tokens, num_parts=len(parts), kv_heads=2, group=group,
        tile_tokens=tile_tokens, slot_rows=slot_rows, scale_log2=scale * np.log2(np.e),
    )  # fmt: skip
    inputs = Inputs(q.ctypes.data, k.ctypes.data, v.ctypes.data, max_keys)
    library.merge(head_dim, ctypes.byref(arguments), ctypes.byref(inputs), num_blocks)

    is_cut = np.zeros(num_tokens, bool)
    for first_token, count, *_, num_parts, _, _ in parts:
        is_cut[first_token : first_token + count] |= num_parts > 1
    assert np.isnan(out[~is_cut].astype(np.float32)).all(), "others are not touched"
    for token in np.flatnonzero(is_cut):
        request = token_request[token]
        expected = attention(q[token], k[request], v[request], positions[token], scale)
        scores = scale * np.einsum("kgh,nkh->kgn", q[token], k[request][: positions[token] + 1])
        assert_has_values(expected)
        np.testing.assert_allclose(sums[token], np.log(np.exp(scores).sum(axis=-1)), rtol=1e-4)
        np.testing.assert_allclose(out[token].astype(np.float64), expected, rtol=0.01, atol=0.001)
