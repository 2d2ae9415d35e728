"""Tests the projections of 32 or 64 tokens at a time, and of one token whose activations they split themselves
(projection.cuh), compiled for the host: all blocks of a cluster with their pipeline, products, exchange of
sums and epilogues, without the asynchrony of the tensor cores.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values
from .emulated_experts import Scales, ordered, stack

pytestmark = on_host.needs_compiler
BFLOAT16 = ml_dtypes.bfloat16
EPSILON = 1e-5
BF16, FP8, SPLIT, SINGLE, ROUNDED = range(
    5
)  # weights; of the last three, activations are split, to be split, or rounded


class Problem(ctypes.Structure):
    """Mirrors the struct in emulated/projection.cpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("batch", "columns", "tiles", "splits", "layer_row")),
        *((name, ctypes.c_void_p) for name in ("x", "weights")),
        ("scales", Scales),
        ("sums", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "pages", "page_size", "max_pages")),
        *((name, ctypes.c_void_p) for name in "q_gain k_gain cos_sin page_table positions q cache".split()),
        *((name, ctypes.c_void_p) for name in "residual next_gain out scaled_out sums_out".split()),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return on_host.compiled_projection(tmp_path_factory.mktemp("emulated"), "projection.cpp")


def inputs(format: int, batch: int, columns: int, rows: int) -> tuple[np.ndarray, np.ndarray, dict, np.ndarray]:
    """Returns activations, the result [batch, rows] in float64, the problem so far, and what it points to."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((batch, columns)).astype(BFLOAT16).astype(np.float32)
    if format == ROUNDED:
        x = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    weights = stack(rng.standard_normal((2, rows, columns), np.float32) * columns**-0.5, format != BF16)
    given = {
        "batch": batch, "columns": columns, "tiles": rows // 128, "layer_row": rows, "x": x.ctypes.data,
        "weights": weights.data.ctypes.data, "scales": weights.scales, "epsilon": EPSILON,
    }  # fmt: skip
    product = x.astype(np.float64) @ weights.values[1].astype(np.float64).T
    return x, product, given, (x, weights)


@pytest.mark.parametrize(
    ("format", "batch", "splits"),
    [
        (FP8, 50, 3),
        (FP8, 64, 1),
        (FP8, 70, 2),
        (SPLIT, 30, 3),
        (SPLIT, 32, 1),
        (BF16, 50, 3),
        (BF16, 70, 1),
        (SINGLE, 1, 1),
        (SINGLE, 1, 4),
        (ROUNDED, 70, 1),
        (ROUNDED, 100, 3),
    ],
)
def test_query_key_and_value(library: ctypes.CDLL, format: int, batch: int, splits: int) -> None:
    kv_heads, group, page_size, columns = 1, 2, 16, 512
    x, product, given, _unused = inputs(format, batch, columns, kv_heads * (group + 2) * 128)
    rng = np.random.default_rng(12)
    sums = np.ascontiguousarray((x.reshape(batch, -1, 128) ** 2).sum(axis=2))
    gains = rng.uniform(0.5, 2, (2, 128)).astype(BFLOAT16)
    angles = rng.uniform(-3, 3, (batch, 64)).astype(np.float32)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    positions = rng.integers(0, 2 * page_size, batch).astype(np.int32)
    positions[3::7] = -1
    page_table = rng.permutation(2 * batch).astype(np.int32).reshape(batch, 2)
    q = np.full((batch, kv_heads, group, 128), np.nan, BFLOAT16)
    cache = np.full((2 * batch, kv_heads, 2, page_size, 128), np.nan, BFLOAT16)
    problem = Problem(
        **given, splits=splits, sums=sums.ctypes.data, kv_heads=kv_heads, group=group, page_size=page_size, max_pages=2,
        pages=2 * batch, q_gain=gains[0].ctypes.data, k_gain=gains[1].ctypes.data, cos_sin=cos_sin.ctypes.data,
        page_table=page_table.ctypes.data, positions=positions.ctypes.data, q=q.ctypes.data, cache=cache.ctypes.data,
    )  # fmt: skip
    library.project(format, True, ctypes.byref(problem))
    heads = product.reshape(batch, kv_heads, group + 2, 128)
    heads = heads / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1) + EPSILON)[:, None, None, None]

    def rotated(values: np.ndarray, gain: np.ndarray) -> np.ndarray:
        normed = values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPSILON) * gain.astype(np.float64)
        low, high = normed[..., :64], normed[..., 64:]
        cosine, sine = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

    assert_has_values(heads)
    np.testing.assert_allclose(q.astype(np.float64), rotated(heads[:, :, :group], gains[0]), rtol=0.01, atol=0.01)
    expected = np.full(cache.shape, np.nan)
    real = positions >= 0
    pages, offsets = page_table[np.arange(batch), positions // page_size][real], positions[real] % page_size
    expected[pages, :, 0, offsets] = rotated(heads[:, :, group : group + 1], gains[1])[real, :, 0]
    expected[pages, :, 1, offsets] = heads[real, :, group + 1]
    np.testing.assert_allclose(cache.astype(np.float64), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("format", "batch", "splits"),
    [
        (FP8, 50, 4),
        (FP8, 64, 2),
        (FP8, 70, 1),
        (SPLIT, 20, 4),
        (SPLIT, 32, 1),
        (BF16, 50, 4),
        (BF16, 64, 8),
        (SINGLE, 1, 2),
        (SINGLE, 1, 4),
        (ROUNDED, 70, 1),
        (ROUNDED, 64, 3),
    ],
)
def test_output(library: ctypes.CDLL, format: int, batch: int, splits: int) -> None:
    """What it leaves for the router has the order that 8-bit weights need. 70 tokens take two groups of blocks."""
    columns, embed = 512, 256
    _, product, given, _unused = inputs(format, batch, columns, embed)
    rng = np.random.default_rng(13)
    residual = rng.standard_normal((batch, embed)).astype(BFLOAT16)
    gain = rng.uniform(0.5, 2, embed).astype(BFLOAT16)
    out, scaled = residual.copy(), np.full((2 * batch, embed), np.nan, BFLOAT16)
    sums = np.full((batch, embed // 128), np.nan, np.float32)
    problem = Problem(
        **given, splits=splits, residual=out.ctypes.data, out=out.ctypes.data, next_gain=gain.ctypes.data,
        scaled_out=scaled.ctypes.data, sums_out=sums.ctypes.data,
    )  # fmt: skip
    library.project(format, False, ctypes.byref(problem))
    assert_has_values(product)
    np.testing.assert_allclose(out.astype(np.float64), residual.astype(np.float64) + product, rtol=0.01, atol=0.01)
    expected = (out.astype(np.float32) * gain.astype(np.float32)).astype(BFLOAT16)
    assert_has_values(expected)
    np.testing.assert_array_equal(scaled[:batch], expected if format == BF16 else ordered(expected))
    assert np.isnan(scaled[batch:].astype(np.float32)).all()
    tiles = out.astype(np.float32).reshape(batch, -1, 128)
    np.testing.assert_allclose(sums, (tiles**2).sum(axis=2), rtol=1e-5)
