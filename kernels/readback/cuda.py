"""Reads the tokens of steps of an NVIDIA GPU back through pinned host memory: see ../cuda/sampling."""

import ctypes
import itertools
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, support

from .contract import ReadbackImplementation

_SLEPT = 0.75  # share of the time that such a step took last
_GROWTH = 1.1  # at most, from one time to the next: a step may have waited for another
_POLL_SECONDS = 0.05  # after which XLA is asked whether the step has failed
_step_counts = itertools.count()  # per process, so that a new engine does not find the tokens of an old one


def write_tokens(tokens: jax.Array, step_number: jax.Array) -> jax.Array:
    """See `TokenReadback`."""
    build.load(build.present())
    result = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
    return jax.ffi.ffi_call("meshserve_write_tokens", result, input_output_aliases={0: 0})(tokens, step_number)


def _unsupported_number(num_devices: int) -> str | None:
    return None if num_devices == 1 else f"programs run on {num_devices} devices; one is supported"


IMPLEMENTATION = ReadbackImplementation(
    name="cuda",
    unsupported_device=support.no_ampere,
    unsupported_shapes=_unsupported_number,
    unavailable_reason=partial(build.unbuildable_reason, None),
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    write_tokens=write_tokens,
)


class PinnedTokens:
    """The pinned host memory to which the steps of a GPU write their tokens.

    Raises:
      MemoryError: there is no pinned memory for it.
    """

    def __init__(self, device: jax.Device):
        library = build.load(build.present())
        library.meshserve_pinned_tokens.restype = ctypes.c_void_p
        self._wait_for = library.meshserve_wait_for_tokens
        self._wait_for.argtypes = (
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_double, ctypes.c_double
        )  # fmt: skip
        self._ring = library.meshserve_pinned_tokens(int(device.local_hardware_id))
        if self._ring is None:
            raise MemoryError(f"{device} has no pinned memory for the tokens of a step")
        self.seconds: dict[int, float] = {}  # from a dispatch until its tokens were there, by how many they are

    def next_step_number(self) -> int:
        """Returns the number of a new step, a positive int32. It comes again only after 2^31 - 1 steps."""
        return 1 + next(_step_counts) % ((1 << 31) - 1)

    def wait_for(self, step_number: int, tokens: np.ndarray, sleep_seconds: float, seconds: float) -> bool:
        """Reads the tokens of a step, without the GIL: sleeps, then polls until so long has passed.

        Returns whether they are there.
        """
        return bool(self._wait_for(self._ring, step_number, len(tokens), tokens.ctypes.data, sleep_seconds, seconds))


class PendingTokens:
    """The tokens of a dispatched step, for `np.asarray`.

    Args:
      pinned: Where the step writes them.
      step_number: The step's.
      tokens: The same tokens on the device.
    """

    def __init__(self, pinned: PinnedTokens, step_number: int, tokens: Any):
        self._pinned, self._step_number, self._tokens = pinned, step_number, tokens
        self._dispatched = time.perf_counter()
        self.shape, self.dtype = tokens.shape, tokens.dtype

    def block_until_ready(self) -> "PendingTokens":
        """Waits until the step has ended, for `jax.block_until_ready`."""
        self._tokens.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Waits. Raises the error of a step that has failed."""
        (num_tokens,) = self.shape
        found, usual = np.empty(num_tokens, np.int32), self._pinned.seconds.get(num_tokens, 0.0)
        sleep_seconds = _SLEPT * usual - (time.perf_counter() - self._dispatched)
        while not self._pinned.wait_for(
            self._step_number, found, sleep_seconds, max(sleep_seconds, 0.0) + _POLL_SECONDS
        ):
            if self._tokens.is_ready():
                return np.asarray(self._tokens)
            sleep_seconds = 0.0
        seconds = time.perf_counter() - self._dispatched
        self._pinned.seconds[num_tokens] = min(seconds, usual * _GROWTH) if usual else seconds
        return found
