"""Tests persistent_attention.cuh compiled for the host."""

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEAD_DIM, PAGE_SIZE, KV_HEADS = 128, 32, 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "persistent_attention.cpp", flags=flags)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("is_lone", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 3, 40])
@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize(
    ("lengths", "num_parts"),
    [((1, 16, 0, 17, 150, 40), (1,) * 6), ((2_100, 3, 0, 700, 64, 65, 0), (3, 1, 1, 7, 1, 2, 1))],
)
def test_attention_is_the_float64_computation(
    library: ctypes.CDLL,
    lengths: tuple[int, ...],
    num_parts: tuple[int, ...],
    group: int,
    num_blocks: int,
    is_lone: bool,
) -> None:
    """The cache holds NaN wherever no request has a key or a value. With 7 parts, some have no tiles."""
    rng = np.random.default_rng(group)
    num_requests, max_pages = len(lengths), -(-max(lengths) // PAGE_SIZE)
    num_pages = num_requests * max_pages + 3
    pages = rng.permutation(num_pages)[: num_requests * max_pages].reshape(num_requests, max_pages).astype(np.int32)
    plan = [(r, i, num_parts[r], lengths[r]) for r in range(num_requests) for i in range(num_parts[r])]
    plan_array = np.array([*plan, (-1, 0, 0, 0), (-1, 0, 0, 0)], np.int32)
    q = rng.standard_normal((num_requests, KV_HEADS, group, HEAD_DIM), np.float32).astype(BFLOAT16)
    q = np.concatenate([q, np.full_like(q[:1], np.nan)])  # what lies behind the queries
    cache = np.full((num_pages, KV_HEADS, 2, PAGE_SIZE, HEAD_DIM), np.nan, BFLOAT16)
    expected = np.zeros((num_requests, KV_HEADS, group, HEAD_DIM))
    for request, length in enumerate(lengths):
        kv = rng.standard_normal((length, KV_HEADS, 2, HEAD_DIM), np.float32).astype(BFLOAT16)
        for position in range(length):
            cache[pages[request, position // PAGE_SIZE], :, :, position % PAGE_SIZE] = kv[position]
        k, v = kv.astype(np.float64).transpose(2, 1, 0, 3)  # [K, tokens, H]
        scores = q[request].astype(np.float64) @ k.transpose(0, 2, 1) * HEAD_DIM**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) if length else scores
        expected[request] = weights @ v / weights.sum(axis=-1, keepdims=True) if length else 0
    out = np.full(expected.shape, np.nan, BFLOAT16)
    unmerged = np.full((len(plan_array), KV_HEADS, group, HEAD_DIM + 4), np.nan, np.float32)
    arrived, claims = np.zeros((num_requests, KV_HEADS), np.int32), np.array([0, 77], np.int32)
    arrays = [address(array) for array in (q, cache, pages, plan_array, out, unmerged, arrived, claims)]
    sizes = (len(plan_array), KV_HEADS, group, PAGE_SIZE, max_pages, cache.size // HEAD_DIM, num_blocks, is_lone)
    library.attend(*arrays, *sizes, ctypes.c_float(HEAD_DIM**-0.5 * math.log2(math.e)))
    assert_has_values(expected)
    error = np.linalg.norm(out.astype(np.float64) - expected, axis=-1)
    assert (error <= 0.01 * np.linalg.norm(expected, axis=-1)).all()
    assert not out[np.array(lengths) == 0].any()
    assert claims[1] == 0
