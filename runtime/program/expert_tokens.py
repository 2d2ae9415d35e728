"""Reads the counts of chosen experts from the devices now and then, for metrics.

The counts are summed up on the devices by the steps themselves (`choices`), and stay there. About once a second a copy
of them is dispatched after a step, and travels to the host while steps go on. Nothing waits for it. All devices have
the same counts, so one device of this process suffices, also among several processes.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshserve.sharding.expert_layout import ExpertLayout

from .expert_balance import ExpertBalance, device_counts, imbalance

_SECONDS_BETWEEN_COPIES = 1.0
_WINDOW_SECONDS = 60.0


class ExpertTokens:
    """The counts of one runner. `observe` is for the engine's thread, `balance` for any.

    Args:
      layout: Which device holds which experts.
      shape: The shape of the counts, as `choices.counts_shape`.
      device: A device of this process that has them.
      clock: Returns monotonic time in seconds.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        shape: jax.ShapeDtypeStruct,
        device: jax.Device,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._layout, self._device, self._clock = layout, device, clock
        local = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=SingleDeviceSharding(device))
        # Compiled here, because a server that is ready compiles nothing. The next step consumes the original.
        self._copy = jax.jit(jnp.copy).lower(local).compile()
        self._lock = threading.Lock()
        self._copied: Any = None  # an array that is not read yet
        self._copied_seconds = -np.inf
        self._last = np.zeros(shape.shape, np.uint32)  # as read, which wraps around
        self._total = np.zeros(shape.shape, np.int64)
        self._window_start, self._next_start = self._total, self._total  # totals at the starts of two windows
        self._turned_seconds = clock()

    def observe(self, counts: jax.Array) -> None:
        """Copies the counts [layers, experts], replicated, if the last copy is old enough. Called between two steps."""
        now = self._clock()
        if now - self._copied_seconds < _SECONDS_BETWEEN_COPIES:
            return
        with self._lock:
            self._read()
            self._copied, self._copied_seconds = self._copy(self._local(counts)), now
            self._copied.copy_to_host_async()
            if now - self._turned_seconds >= _WINDOW_SECONDS:
                self._window_start, self._next_start, self._turned_seconds = self._next_start, self._total, now

    def begin(self, counts: jax.Array) -> None:
        """Counts from these counts on, as those of a new runner. Waits for them."""
        with self._lock:
            self._last, self._copied, self._copied_seconds = np.array(self._local(counts)), None, -np.inf
            self._total = self._window_start = self._next_start = np.zeros(counts.shape, np.int64)

    def _local(self, counts: jax.Array) -> jax.Array:
        return next(shard.data for shard in counts.addressable_shards if shard.device == self._device)

    def balance(self) -> ExpertBalance:
        """Returns the counts as of about a second before the last step."""
        with self._lock:
            if self._copied is not None and self._copied.is_ready():
                self._read()
            total, recent = self._total, self._total - self._window_start
        return ExpertBalance(
            expert_tokens=total.sum(axis=0),
            device_tokens=device_counts(total, self._layout).sum(axis=0),
            expert_imbalance=imbalance(recent),
            device_imbalance=imbalance(device_counts(recent, self._layout)),
        )

    def _read(self) -> None:
        """Adds what the last copy counted."""
        if self._copied is None:
            return
        counts = np.asarray(self._copied)
        self._total = self._total + (counts - self._last)  # unsigned: right even if the counts wrapped around
        self._last, self._copied = counts, None
