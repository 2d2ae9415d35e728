"""Tests decode_attention.cuh compiled for the host, with a cache in bfloat16 and in 8 bits."""

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler

BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
LENGTHS = (1, 16, 0, 17, 150, 40)  # 0: padding


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    flags = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "decode_attention.cpp", flags=flags)


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize(("dtype", "tile_tokens"), [(BFLOAT16, 16), (E4M3, 16), (E4M3, 32)], ids=str)
@pytest.mark.parametrize(("head_dim", "group", "stages"), [(128, 4, 3), (64, 8, 2), (128, 1, 2)])
def test_attention_is_the_float64_computation(
    library: ctypes.CDLL, dtype: np.dtype, tile_tokens: int, head_dim: int, group: int, stages: int
) -> None:
    """The cache holds NaN wherever no request has a key or a value. Rounded to e4m3 is the result in bfloat16."""
    rng, kv_heads, page_size = np.random.default_rng(head_dim + group), 2, 32
    max_pages = -(-max(LENGTHS) // page_size)
    num_pages = len(LENGTHS) * max_pages + 3
    pages = rng.permutation(num_pages)[: len(LENGTHS) * max_pages].reshape(len(LENGTHS), max_pages).astype(np.int32)
    positions = np.array(LENGTHS, np.int32) - 1
    q = rng.standard_normal((len(LENGTHS), kv_heads, group, head_dim), np.float32).astype(BFLOAT16)
    q[:, 0, 0], q[:, 0, 0, 0] = 0, 1e6  # beyond the range of f16
    q = np.concatenate([q, np.full_like(q[:1], np.nan)])  # what lies behind the queries
    cache = np.full((num_pages, kv_heads, 2, page_size, head_dim), np.nan, dtype)
    expected = np.zeros((len(LENGTHS), kv_heads, group, head_dim))
    for request, length in enumerate(LENGTHS):
        kv = rng.standard_normal((length, kv_heads, 2, head_dim), np.float32).astype(dtype)
        for position in range(length):
            cache[pages[request, position // page_size], :, :, position % page_size] = kv[position]
        k, v = kv.astype(np.float64).transpose(2, 1, 0, 3)  # [K, tokens, H]
        scores = q[request].astype(np.float64) @ k.transpose(0, 2, 1) * head_dim**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) if length else scores
        expected[request] = weights @ v / weights.sum(axis=-1, keepdims=True) if length else 0
    out = np.full(expected.shape, np.nan, BFLOAT16)
    arrays = [address(array) for array in (q, cache, pages, positions)]
    sizes = (len(LENGTHS), kv_heads, group, page_size, max_pages, cache.size // head_dim, stages, tile_tokens)
    scale_log2 = ctypes.c_float(head_dim**-0.5 * math.log2(math.e))
    library.attend(head_dim, int(dtype == E4M3), *arrays, address(out), *sizes, scale_log2, None)
    assert_has_values(expected)
    error = np.linalg.norm(out.astype(np.float64) - expected, axis=-1)
    assert (error <= 0.01 * np.linalg.norm(expected, axis=-1)).all()
    assert not out[positions < 0].any()
    if head_dim == 128 and (dtype, tile_tokens) != (E4M3, 16):
        numbers, scales = np.empty(out.shape, E4M3), np.full((kv_heads, group, len(LENGTHS)), np.nan, np.float32)
        library.attend(128, int(dtype == E4M3), *arrays, address(numbers), *sizes, scale_log2, address(scales))
        highest = np.abs(out.astype(np.float32)).max(axis=-1)
        np.testing.assert_array_equal(scales.transpose(2, 0, 1), np.where(highest > 0, highest / np.float32(448), 1))
        rounded = (out.astype(np.float64) / scales.transpose(2, 0, 1)[..., None]).astype(E4M3)
        np.testing.assert_array_equal(numbers.astype(np.float32), rounded.astype(np.float32))


def test_a_tile_in_8_bits_is_widened_in_the_order_that_wgmma_reads(library: ctypes.CDLL) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (128, 128)).astype(np.uint8)
    halves = np.empty((2, 128, 8, 8), BFLOAT16)  # half, row, chunk, column
    library.widen(address(numbers), address(halves), 128)
    values = numbers.view(E4M3).astype(np.float32)
    values[np.isnan(values)] = np.where(numbers[np.isnan(values)] > 127, -480, 480)  # a number like others
    row, chunk = np.arange(128)[:, None], np.arange(8)
    assert_has_values(values)
    for half in range(2):
        found = halves[half][row, chunk ^ (row % 8)].reshape(128, 64)
        np.testing.assert_array_equal(found.astype(np.float32), values[:, 64 * half : 64 * half + 64])
