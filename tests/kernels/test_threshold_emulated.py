"""Tests threshold.cuh compiled for the host, with 64 CUDA threads."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from . import on_host
from .comparing import assert_has_values
from .thresholds import FILTERS, keeps_the_right_tokens, key_of, parameters, rows

pytestmark = on_host.needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compiles the kernel's source with a cuda_runtime.h for the host, fewer threads and less shared memory."""
    kernel = "sampling/threshold.cuh"
    return on_host.compiled(
        tmp_path_factory.mktemp("emulated"),
        "threshold.cpp",
        stand_ins="emulated_threshold",
        replaced=[
            (kernel, "kThreads = 1024", "kThreads = 64"),
            # Small, to cover rows with more equal values than fit.
            (kernel, "kMaxListed = 40 * 1024", "kMaxListed = 256"),
            (kernel, "extern __shared__ uint32_t list[];", "static uint32_t list[kMaxListed];"),
        ],
    )


def find_thresholds(library: ctypes.CDLL, logits: np.ndarray, **filters: float) -> np.ndarray:
    num, vocab = logits.shape
    arrays = parameters(num, **filters)
    found = np.zeros(num, np.uint32)
    inputs = (logits, arrays["temperature"], arrays["top_k"], arrays["top_p"], arrays["min_p"], found)
    library.find_thresholds(num, vocab, *(ctypes.c_void_p(array.ctypes.data) for array in inputs))
    return found


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [1_000, 1_003])
def test_a_row_keeps_what_its_filters_keep(library: ctypes.CDLL, vocab: int, filters: dict[str, float]) -> None:
    logits = rows(11, vocab)
    for index, (row, threshold) in enumerate(zip(logits, find_thresholds(library, logits, **filters), strict=True)):
        assert keeps_the_right_tokens(row, threshold, **filters), f"row {index}"


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rows_with_values_that_are_not_finite_spoil_no_other(library: ctypes.CDLL, filters: dict[str, float]) -> None:
    logits = rows(11, 200)
    spoiled = np.repeat(logits, 2, axis=0)
    for index, value in enumerate((np.nan, np.inf, -np.nan) * 3):
        spoiled[2 * index, index % 3 :: 7] = value
    spoiled[2 * 9] = np.nan
    found = find_thresholds(library, spoiled, **filters)
    assert_has_values(logits)
    np.testing.assert_array_equal(found[1::2], find_thresholds(library, logits, **filters))


def test_rows_without_filters_and_greedy_rows_keep_everything(library: ctypes.CDLL) -> None:
    logits = rows(4, 100)
    assert not find_thresholds(library, logits).any()
    assert not find_thresholds(library, logits, temperature=0.0, top_k=3, top_p=0.5, min_p=0.5).any()


def test_top_k_is_exact_among_neighbours(library: ctypes.CDLL) -> None:
    """Uses consecutive floats on both sides of zero, so that every bit of the keys matters."""
    keys = np.concatenate([np.arange(40, dtype=np.uint32) + 0x80000000, 0x7FFFFFFF - np.arange(40, dtype=np.uint32)])
    bits = np.where(keys >> 31, keys & 0x7FFFFFFF, ~keys).astype(np.uint32)
    logits = np.random.default_rng(1).permutation(bits.view(np.float32))[None]
    order = np.sort(key_of(logits[0]))[::-1]
    for k in (1, 2, 39, 40, 41, 79, 80):
        assert find_thresholds(library, logits, top_k=k)[0] == order[k - 1]


@pytest.mark.parametrize("block_kilobytes", [99, 163, 227], ids=["8.6, 8.9 and 12.x", "8.0 and 8.7", "9.0 and 10.x"])
def test_the_list_fits_into_what_a_block_of_each_gpu_may_have(tmp_path: Path, block_kilobytes: int) -> None:
    kernel = "sampling/threshold.cuh"
    replaced = [(kernel, "extern __shared__ uint32_t list[];", "static uint32_t list[kMaxListed];")]
    library = on_host.compiled(tmp_path, "threshold.cpp", stand_ins="emulated_threshold", replaced=replaced)
    shared_bytes = library.shared_bytes(block_kilobytes * 1024)
    assert shared_bytes <= block_kilobytes * 1024
    assert shared_bytes >= min(0.98 * block_kilobytes, 160) * 1024, "the list is shorter than it could be"
