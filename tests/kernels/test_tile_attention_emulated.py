"""Tests the attention for all GPUs since Ampere (tile_attention.cuh), compiled for the host, in a cache full of NaN."""

import ctypes
import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from meshserve.kernels.paged_attention import cases
from meshserve.kernels.paged_attention.tiles import most_slots, plan_parts

from . import on_host
from .comparing import assert_has_values
from .test_parts_emulated import EXP2, Args

pytestmark = on_host.needs_compiler
BOUND = 5e-3  # limit of ||out - expected|| / ||expected||, as for the kernel on a GPU
NUM_SHARES = 6
FEW_ROWS, MANY_ROWS = 16, 128  # of a tile


def _case(name: str, requests: tuple[tuple[int, int], ...], **shape) -> cases.Case:
    defaults = {"head_dim": 128, "page_size": 16, "dtype": "bfloat16", "num_layers": 1, "kv_heads": 1}
    return cases.Case(name=name, requests=requests, **{**defaults, **shape})


CASES = (
    _case("borders", ((1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65)), group=4),
    _case("chunks", ((33, 90), (1, 40), (5, 70)), group=3, page_size=48, kv_heads=2),
    _case("head-64", ((33, 90), (1, 40)), group=8, head_dim=64, page_size=32),
    _case("group-1", ((1, 70), (140, 140)), group=1, head_dim=64),
    _case("parts", ((1, 1100), (6, 1025)), group=2, head_dim=64, page_size=64),
    _case("scores-that-grow", ((1, 300), (3, 200)), group=4, head_dim=64),
    _case("empty-and-padding", ((0, 0), (1, 9), (7, 20)), group=4, num_padding_tokens=5, num_padding_requests=3),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    replaced = [("attention/prefill_parts.cuh", *EXP2)]
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "tile_attention.cpp", replaced=replaced, flags=flags)


@pytest.mark.parametrize("cache_dtype", ["", "float8_e4m3fn"], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize(("tile_rows", "block_keys"), [(FEW_ROWS, 64), (MANY_ROWS, 64), (MANY_ROWS, 32)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_the_float64_computation(library, case, tile_rows, block_keys, cache_dtype):
    case = dataclasses.replace(case, cache_dtype=cache_dtype)
    inputs = cases.make_inputs(case, seed=1)
    if case.name == "scores-that-grow":  # so that earlier results are shrunk, which others hardly need
        inputs = dataclasses.replace(inputs, q=(8 * inputs.q).astype(inputs.q.dtype))
    pages = np.ascontiguousarray(cases.expected_cache(inputs)[inputs.layer])
    positions, _, page_table = (np.ascontiguousarray(field) for field in inputs.batch)
    num_tokens, kv_heads, group, head_dim = inputs.q.shape
    tile_tokens = tile_rows // group
    num_shares = NUM_SHARES if case.pages_per_request * case.page_size >= 1024 else 0
    parts = np.asarray(plan_parts(inputs.batch, tile_tokens=tile_tokens, num_shares=num_shares))
    assert (parts[:, 5].max() > 1) == (num_shares > 0)

    out = np.full(inputs.q.shape, np.nan, ml_dtypes.bfloat16)
    sums = np.full(inputs.q.shape[:3], np.nan, np.float32)
    slots, slot_rows = most_slots(num_shares), min(num_tokens, tile_tokens) * group
    unmerged = np.full((slots, kv_heads, slot_rows, head_dim + 4), np.nan, np.float32)
    num_arrived = np.zeros((slots, kv_heads, 2), np.int32)
    arguments = Args(
        parts=parts.ctypes.data, page_table=page_table.ctypes.data, positions=positions.ctypes.data,
        out=out.ctypes.data, unmerged=unmerged.ctypes.data, sums=sums.ctypes.data,
        num_arrived=num_arrived.ctypes.data, num_tokens=num_tokens, num_parts=len(parts),
        max_pages=page_table.shape[1], page_size=case.page_size, kv_heads=kv_heads, group=group,
        tile_tokens=tile_tokens, slot_rows=slot_rows, scale_log2=inputs.scale * math.log2(math.e),
        page_inverse=-(-(1 << 32) // case.page_size),
    )  # fmt: skip
    q = ctypes.c_void_p(inputs.q.ctypes.data)
    library.attend(
        head_dim, bool(cache_dtype), tile_rows, block_keys, q, ctypes.c_void_p(pages.ctypes.data),
        ctypes.byref(arguments),
    )  # fmt: skip

    expected, is_padding = cases.expected_attention(inputs), positions < 0
    attended = out.astype(np.float64)
    assert_has_values(expected[~is_padding])
    assert np.isfinite(attended).all()
    assert not attended[is_padding].any()
    error = np.linalg.norm((attended - expected)[~is_padding], axis=-1)
    size = np.linalg.norm(expected[~is_padding], axis=-1)
    assert (error <= 4 * BOUND * size).all()
    assert 0 < np.linalg.norm(error) <= BOUND * np.linalg.norm(size)
    for token in np.flatnonzero(~is_padding)[:: max(1, num_tokens // 8)]:
        seen = np.arange(positions[token] + 1)
        places = page_table[np.asarray(inputs.batch.token_request)[token], seen // case.page_size]
        keys = pages[places, :, 0, seen % case.page_size].astype(np.float64)
        scores = np.einsum("kgh,nkh->kgn", inputs.q[token].astype(np.float64), keys) * inputs.scale
        np.testing.assert_allclose(sums[token], np.log(np.exp(scores).sum(axis=-1)), rtol=1e-3, atol=1e-3)
