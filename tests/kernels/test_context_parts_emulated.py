"""Tests context_parts.cuh compiled for the host: the assignment of request parts to clusters, and
merging.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler


class Cuts(ctypes.Structure):
    """Mirrors the struct in context_parts.cuh."""

    _fields_ = [
        ("positions", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in "batch num_clusters fewest_shares least_share most_shares".split()),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "context_parts.cpp")


def find_parts(
    library: ctypes.CDLL,
    lengths: list[int],
    fewest_shares: int = 16,
    least_share: int = 256,
    max_context: int = 32768,
    most_shares: int = 1 << 30,
) -> list[int]:
    """Returns each request's number of parts, after checking that consecutive clusters cover every part."""
    num_clusters = library.count_clusters(len(lengths), fewest_shares, least_share, max_context)
    positions = np.asarray(lengths, np.int32) - 1
    parts = np.full((num_clusters, 3), -7, np.int32)
    cuts = Cuts(positions.ctypes.data, len(lengths), num_clusters, fewest_shares, least_share, most_shares)
    library.find_parts(ctypes.byref(cuts), ctypes.c_void_p(parts.ctypes.data))
    num_busy = int((parts[:, 0] >= 0).sum())
    assert (parts[num_busy:] == (-1, 0, 0)).all(), "clusters without work come last"
    found, cluster = {}, 0
    while cluster < num_busy:
        request, _, num_parts = (int(value) for value in parts[cluster])
        assert request not in found
        expected = [[request, index, num_parts] for index in range(num_parts)]
        assert parts[cluster : cluster + num_parts].tolist() == expected
        found[request] = num_parts
        cluster += num_parts
    num_shares = min(max(np.count_nonzero(lengths), fewest_shares), most_shares)
    share = max(least_share, -(-sum(lengths) // num_shares))
    order = [(num_parts == 1, lengths[request] <= share // 2) for request, num_parts in found.items()]
    assert num_clusters == len(lengths) or order == sorted(order), "long requests come first"
    return [found[request] for request in range(len(lengths))]


@pytest.mark.parametrize("seed", range(32))
def test_every_part_of_every_request_has_a_cluster(library, seed):
    rng = np.random.default_rng(seed)
    batch, fewest_shares = int(rng.integers(1, 100)), int(rng.integers(1, 133))
    least_share, max_context = 256 * 2 ** int(rng.integers(0, 4)), 2 ** int(rng.integers(8, 17))
    lengths = np.exp(rng.uniform(0, np.log(max_context), batch)).astype(int) * (rng.random(batch) < 0.8)
    most_shares = 1 << 30 if seed % 2 else int(rng.integers(fewest_shares, 133))
    num_parts = find_parts(library, lengths.tolist(), fewest_shares, least_share, max_context, most_shares)
    num_shares = min(max(np.count_nonzero(lengths), fewest_shares), most_shares)
    share = max(least_share, -(-lengths.sum() // num_shares))
    for length, num in zip(lengths, num_parts, strict=True):
        assert length <= 1.5 * share * num
        assert num == 1 or length >= 0.75 * share * num


@pytest.mark.parametrize("max_context", [256, 300, 2000, 32768])
@pytest.mark.parametrize("num_long", [1, 3, 10, 21, 31, 32])
def test_the_clusters_suffice_for_the_worst_mixes(library, num_long, max_context):
    for length in (3 * max_context // 4, max_context - 1, max_context):
        find_parts(library, [length] * num_long + [1] * (32 - num_long), 1, 256, max_context)


def test_equal_requests_are_not_cut(library):
    assert find_parts(library, [1000] * 33) == [1] * 33
    assert find_parts(library, [1000 + request for request in range(40)]) == [1] * 40


def test_a_long_one_among_short_ones_is_cut(library):
    lengths = [1000] * 20 + [16384] + [1000] * 11
    assert find_parts(library, lengths) == [1] * 20 + [11] + [1] * 11  # shares of 1,481 tokens


def test_with_fewer_shares_than_requests_only_longer_ones_are_cut(library):
    lengths = [1000] * 20 + [4000] * 20  # shares of 2,500 tokens, or of 5,000
    assert find_parts(library, lengths) == [1] * 20 + [2] * 20
    assert find_parts(library, lengths, most_shares=20) == [1] * 40


def test_few_requests_are_cut_until_the_gpu_is_full(library):
    assert find_parts(library, [32768], fewest_shares=16) == [16]
    assert find_parts(library, [4096, 4096], fewest_shares=16) == [8, 8]


def test_padding_takes_no_share(library):
    assert find_parts(library, [1000] * 20 + [0] * 12) == [1] * 32


def test_what_costs_less_than_a_merge_is_not_cut(library):
    assert find_parts(library, [383] + [1] * 31) == [1] * 32
    assert find_parts(library, [384] + [1] * 31) == [2] + [1] * 31


def test_where_no_request_can_be_long_nobody_is_looked_at(library):
    assert library.count_clusters(32, 16, 256, 383) == 32
    assert find_parts(library, [383] + [1] * 31, max_context=383) == [1] * 32


@pytest.mark.parametrize(("num_parts", "group"), [(2, 4), (8, 1), (11, 8)])
def test_the_last_part_merges_them_all_once_a_call(library, num_parts, group):
    rng = np.random.default_rng(num_parts)
    head_dim, num_calls = 128, 3
    parts = np.full((num_calls, num_parts, group, head_dim + 4), np.nan, np.float32)
    parts[..., :head_dim] = out = rng.standard_normal((num_calls, num_parts, group, head_dim))
    parts[..., head_dim] = largest = rng.uniform(-30, 30, (num_calls, num_parts, group))
    parts[..., head_dim + 1] = total = rng.uniform(1, 50, (num_calls, num_parts, group))
    parts[0, 0, :, :head_dim], parts[0, 0, :, head_dim], parts[0, 0, :, head_dim + 1] = (
        0,
        -np.inf,
        0,
    )  # attended to no token
    largest[0, 0] = -np.inf
    merged = np.full((num_calls, group, head_dim), np.nan, ml_dtypes.bfloat16)
    library.merge(num_parts, group, num_calls, ctypes.c_void_p(parts.ctypes.data), ctypes.c_void_p(merged.ctypes.data))
    scale = np.exp2(largest - largest.max(axis=1, keepdims=True))
    expected = (out * scale[..., None]).sum(axis=1) / (total * scale).sum(axis=1)[..., None]
    assert_has_values(expected)
    np.testing.assert_allclose(merged.astype(np.float64), expected, rtol=0.01, atol=1e-4)
