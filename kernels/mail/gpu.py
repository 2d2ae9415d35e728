"""Sends the tokens of steps to the host from an NVIDIA Hopper GPU: see ../cuda/mail.cuh."""

import ctypes
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build

_SLEPT = 0.75  # of the time that such a step took last
_GROWTH = 1.1  # at most, from one time to the next: a step may have waited for another
_LOOK_SECONDS = 0.05  # after which XLA is asked whether the step has failed
_numbers = itertools.count(1)  # of this process's steps, so that a new engine does not find the tokens of an old one


def mail_tokens(tokens: jax.Array, number: jax.Array) -> jax.Array:
    """See `MailTokens`."""
    build.load()
    result = jax.ShapeDtypeStruct(tokens.shape, jnp.int32)
    return jax.ffi.ffi_call("meshserve_mail_tokens", result, input_output_aliases={0: 0})(tokens, number)


class Mailbox:
    """Receives the tokens of a GPU's steps, in pinned memory.

    Raises:
      MemoryError: there is no pinned memory for it.
    """

    def __init__(self, device: jax.Device):
        library = build.load()
        library.meshserve_mail_boxes.restype = ctypes.c_void_p
        self._take = library.meshserve_take_mail
        self._take.argtypes = (
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_double, ctypes.c_double
        )  # fmt: skip
        self._boxes = library.meshserve_mail_boxes(int(device.local_hardware_id))
        if self._boxes is None:
            raise MemoryError(f"{device} has no pinned memory for the tokens of a step")
        self.seconds: dict[int, float] = {}  # from a dispatch until its tokens came, by their number

    def take(self, number: int, tokens: np.ndarray, sleep_seconds: float, seconds: float) -> bool:
        """Waits for the tokens of a step, without the GIL: sleeps, then looks again and again until so long has passed.

        Returns whether they have come.
        """
        return bool(self._take(self._boxes, number, len(tokens), tokens.ctypes.data, sleep_seconds, seconds))

    def next_number(self) -> int:
        """Returns the number of a new step."""
        return next(_numbers) % (1 << 31) or next(_numbers)


class Letter:
    """The tokens of a dispatched step, for `np.asarray`.

    Args:
      mailbox: Receives them.
      number: The step's.
      tokens: The same tokens on the device.
    """

    def __init__(self, mailbox: Mailbox, number: int, tokens: Any):
        self._mailbox, self._number, self._tokens = mailbox, number, tokens
        self._dispatched = time.perf_counter()
        self.shape, self.dtype = tokens.shape, tokens.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Waits. Raises the error of a step that has failed."""
        (num_tokens,) = self.shape
        found, usual = np.empty(num_tokens, np.int32), self._mailbox.seconds.get(num_tokens, 0.0)
        sleep_seconds = _SLEPT * usual - (time.perf_counter() - self._dispatched)
        while not self._mailbox.take(self._number, found, sleep_seconds, max(sleep_seconds, 0.0) + _LOOK_SECONDS):
            if self._tokens.is_ready():
                return np.asarray(self._tokens)
            sleep_seconds = 0.0
        seconds = time.perf_counter() - self._dispatched
        self._mailbox.seconds[num_tokens] = min(seconds, usual * _GROWTH) if usual else seconds
        return found
