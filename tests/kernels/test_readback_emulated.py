"""Tests readback.cuh compiled for the host, and the arrays that wait for what it has written."""

import ctypes
import itertools
import threading

import jax
import numpy as np
import pytest

from meshserve.kernels.readback import cuda
from meshserve.kernels.readback.cuda import PendingTokens, PinnedTokens

from . import on_host
from .comparing import assert_has_values

pytestmark = on_host.needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "readback.cpp", stand_ins="emulated_readback")


def write(library: ctypes.CDLL, step_number: int, tokens: np.ndarray) -> None:
    out = np.zeros_like(tokens)
    library.write_tokens(
        ctypes.c_void_p(tokens.ctypes.data), step_number, ctypes.c_void_p(out.ctypes.data), len(tokens)
    )
    assert_has_values(tokens)
    np.testing.assert_array_equal(out, tokens)


@pytest.fixture
def pinned(library: ctypes.CDLL) -> PinnedTokens:
    found = PinnedTokens.__new__(PinnedTokens)
    found.seconds = {}
    library.wait_for_tokens.argtypes = (
        ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_double, ctypes.c_double
    )  # fmt: skip
    found._ring, found._wait_for = None, lambda _, *arguments: library.wait_for_tokens(*arguments)
    return found


class OnDevice:
    """Tokens as an array of a device, which the host should not have to copy."""

    def __init__(self, tokens: np.ndarray, *, is_ready: bool):
        self.shape, self.dtype, self._tokens, self._is_ready = tokens.shape, tokens.dtype, tokens, is_ready

    def is_ready(self) -> bool:
        return self._is_ready

    def block_until_ready(self) -> None:
        self._is_ready = True

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        assert self._is_ready, "the tokens are in pinned memory"
        return self._tokens


def test_each_step_has_its_tokens(library: ctypes.CDLL, pinned: PinnedTokens) -> None:
    """Those of the last eight steps are kept, so that several may be in flight."""
    draw = np.random.default_rng(0)
    sizes = (4, 1, 1024, 7, 4, 300, 2, 4)
    steps = {pinned.next_step_number(): draw.integers(-1, 1 << 20, size, np.int32) for size in sizes}
    for step_number, tokens in steps.items():
        write(library, step_number, tokens)
    for step_number, tokens in steps.items():
        np.testing.assert_array_equal(PendingTokens(pinned, step_number, OnDevice(tokens, is_ready=False)), tokens)
    assert set(pinned.seconds) == {len(tokens) for tokens in steps.values()}


def test_the_host_waits_for_a_step(library: ctypes.CDLL, pinned: PinnedTokens) -> None:
    tokens, step_number = np.arange(5, dtype=np.int32), pinned.next_step_number()
    write(library, step_number - 8, tokens + 1)  # an earlier step in the same entry of the ring
    pending = PendingTokens(pinned, step_number, OnDevice(tokens, is_ready=False))
    step = threading.Timer(0.12, write, (library, step_number, tokens))
    step.start()
    np.testing.assert_array_equal(pending, tokens)
    step.join()


@pytest.mark.parametrize("usual_seconds", [0.0, 0.02])
def test_the_tokens_of_a_step_that_writes_none_are_copied(pinned: PinnedTokens, usual_seconds: float) -> None:
    """So the error of a step that has failed is raised, as by any array."""
    tokens = np.arange(3, dtype=np.int32)
    pinned.seconds[3] = usual_seconds
    pending = PendingTokens(pinned, pinned.next_step_number(), OnDevice(tokens, is_ready=True))
    np.testing.assert_array_equal(pending, tokens)


def test_jax_can_wait_for_a_step(pinned: PinnedTokens) -> None:
    tokens = OnDevice(np.arange(3, dtype=np.int32), is_ready=False)
    jax.block_until_ready(PendingTokens(pinned, pinned.next_step_number(), tokens))
    assert tokens.is_ready()


def test_steps_of_number_0_write_nothing(library: ctypes.CDLL, pinned: PinnedTokens) -> None:
    tokens = np.arange(3, dtype=np.int32)
    write(library, 8 * pinned.next_step_number(), tokens)
    write(library, 0, tokens + 1)  # in the same entry of the ring
    assert not pinned.wait_for(0, np.empty(2, np.int32), 0.0, 0.01)


def test_step_numbers_are_positive_int32_for_ever(pinned: PinnedTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    most = np.iinfo(np.int32).max
    monkeypatch.setattr(cuda, "_step_counts", itertools.count(most - 2))
    assert [pinned.next_step_number() for _ in range(4)] == [most - 1, most, 1, 2]
