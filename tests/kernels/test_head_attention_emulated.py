"""Tests the QKV projection whose clusters attend (head_attention.cuh) compiled for the host: all blocks of
a cluster, from the normed input to attended heads and written pages.
"""

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler
BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
EPSILON, PAGE = 1e-5, 32


class Problem(ctypes.Structure):
    """Mirrors the struct in emulated/head_attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("batch", "columns", "splits", "layer_row")),
        *((name, ctypes.c_void_p) for name in ("x", "weights")),
        ("sums", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("epsilon", "scale_log2")),
        *(
            (name, ctypes.c_int)
            for name in "kv_heads group pages page_size max_pages early_stages late_stages least_tiles".split()
        ),
        *((name, ctypes.c_void_p) for name in "q_gain k_gain cos_sin page_table positions cache attended".split()),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return on_host.compiled_projection(tmp_path_factory.mktemp("emulated"), "head_attention.cpp")


# Lengths of the contexts with the tokens of the step, by row; 0: padding. A draft's row is negative: it belongs to the
# request of the row before.
@pytest.mark.parametrize(
    ("dtype", "lengths", "group", "splits", "least_tiles"),
    [
        (BFLOAT16, (1,), 2, 2, 8),
        (BFLOAT16, (700,), 2, 2, 4),
        (BFLOAT16, (290, 17, 18, 0, 64), 2, 2, 2),
        (BFLOAT16, (90, -91, -92, 33, 50, -51, 16, 1), 2, 2, 8),
        (BFLOAT16, (82, 300), 1, 2, 4),
        (E4M3, (400, -401, 7), 2, 2, 2),
        (E4M3, (700, 1, 15), 2, 2, 4),
        (BFLOAT16, (333,), 4, 1, 2),
        (BFLOAT16, (1200, 40), 4, 1, 8),
    ],
)
def test_heads(
    library: ctypes.CDLL, dtype: np.dtype, lengths: tuple[int, ...], group: int, splits: int,
    least_tiles: int,
) -> None:  # fmt: skip
    """The cache holds NaN wherever no request has a key or a value."""
    rng, batch, kv_heads, columns = np.random.default_rng(11), len(lengths), 2, 512 * splits
    x = rng.standard_normal((batch, columns)).astype(BFLOAT16).astype(np.float32)
    rows = kv_heads * (group + 2) * 128
    weights = (rng.standard_normal((2, rows, columns), np.float32) * columns**-0.5).astype(BFLOAT16)
    sums = np.ascontiguousarray((x.reshape(batch, -1, 128) ** 2).sum(axis=2))
    gains = rng.uniform(0.5, 2, (2, 128)).astype(BFLOAT16)
    angles = rng.uniform(-3, 3, (batch, 64)).astype(np.float32)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    positions = np.abs(np.array(lengths, np.int32)) - 1
    max_pages = -(-max(map(abs, lengths)) // PAGE)
    num_pages = batch * max_pages + 2
    pages = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages).astype(np.int32)
    for row in range(1, batch):
        if lengths[row] < 0:
            pages[row] = pages[row - 1]

    heads = (x.astype(np.float64) @ weights[1].astype(np.float64).T).reshape(batch, kv_heads, group + 2, 128)
    heads = heads / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1) + EPSILON)[:, None, None, None]

    def rotated(values: np.ndarray, gain: np.ndarray) -> np.ndarray:
        normed = values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPSILON) * gain.astype(np.float64)
        low, high = normed[..., :64], normed[..., 64:]
        cosine, sine = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

    q, k = rotated(heads[:, :, :group], gains[0]), rotated(heads[:, :, group : group + 1], gains[1])[:, :, 0]
    new = np.stack([k, heads[:, :, group + 1]], axis=2)  # [batch, K, 2, H]
    cache = np.full((num_pages, kv_heads, 2, PAGE, 128), np.nan, dtype)
    for row, position in enumerate(positions):
        if row + 1 == batch or lengths[row + 1] >= 0:  # a request's last row
            num_new = 1
            while lengths[row - num_new + 1] < 0:
                num_new += 1
            for at in range(position + 1 - num_new):
                old = rng.standard_normal((kv_heads, 2, 128), np.float32)
                cache[pages[row, at // PAGE], :, :, at % PAGE] = old.astype(dtype)
    expected_cache = cache.astype(np.float64)
    for row, position in enumerate(positions):
        if position >= 0:
            expected_cache[pages[row, position // PAGE], :, :, position % PAGE] = new[row]
    expected = np.zeros((batch, kv_heads, group, 128))
    for row, position in enumerate(positions):
        if position >= 0:
            at = np.arange(position + 1)
            keys, values = expected_cache[pages[row, at // PAGE], :, :, at % PAGE].transpose(2, 1, 0, 3)
            scores = q[row] @ keys.transpose(0, 2, 1) * 128**-0.5
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            expected[row] = shares @ values / shares.sum(axis=-1, keepdims=True)

    attended = np.full(expected.shape, np.nan, BFLOAT16)
    problem = Problem(
        batch=batch, columns=columns, splits=splits, layer_row=rows, x=x.ctypes.data, weights=weights.ctypes.data,
        sums=sums.ctypes.data, epsilon=EPSILON, scale_log2=128**-0.5 * math.log2(math.e),
        kv_heads=kv_heads, group=group, pages=num_pages, page_size=PAGE, max_pages=max_pages,
        early_stages=2 if dtype == E4M3 else 1, late_stages=2, least_tiles=least_tiles,
        q_gain=gains[0].ctypes.data, k_gain=gains[1].ctypes.data, cos_sin=cos_sin.ctypes.data,
        page_table=pages.ctypes.data, positions=positions.ctypes.data, cache=cache.ctypes.data,
        attended=attended.ctypes.data,
    )  # fmt: skip
    library.attend_heads(int(dtype == E4M3), ctypes.byref(problem))
    tolerance = 0.08 if dtype == E4M3 else 0.02
    np.testing.assert_allclose(cache.astype(np.float64), expected_cache, rtol=tolerance, atol=tolerance)
    found = attended.astype(np.float64)
    assert_has_values(expected[positions >= 0])
    error = np.linalg.norm(found - expected, axis=-1)
    assert (error <= (0.05 if dtype == E4M3 else 0.015) * np.linalg.norm(expected, axis=-1)).all(), error
    assert not found[positions < 0].any()
