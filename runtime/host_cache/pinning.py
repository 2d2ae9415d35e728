"""Pins the host memory of a tier while the server starts, beside the loading of the weights.

In: the sizes of the tier. Out: host memory that jax has pinned and keeps, so that no step waits for it later. Pinning
takes 0.4 to 0.8 s a GiB: the operating system zeroes and locks every page. jax's allocator keeps what was pinned,
so the blocks that are made here are dropped again, and those of `page_copies` take their places.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ..api.errors import ConfigError
from .sizes import HostCacheSize

PINNED = "pinned_host"

_GIB = 1 << 30
_LOG_SECONDS = 5.0  # between two lines of progress

_log = logging.getLogger(__name__)


def host_shardings(devices: Sequence[jax.Device]) -> list[SingleDeviceSharding] | None:
    """Returns where each device's part of a block lies in pinned host memory; None if a device has no such memory."""
    if not all(PINNED in {memory.kind for memory in device.addressable_memories()} for device in devices):
        return None
    return [SingleDeviceSharding(device, memory_kind=PINNED) for device in devices]


@contextlib.contextmanager
def pinned_beside(size: HostCacheSize | None, devices: Sequence[jax.Device]) -> Iterator[None]:
    """Pins the memory of a tier in a thread beside what the context does, and waits for it at its end.

    Args:
      size: The sizes of the tier; None without one, and then nothing is done.
      devices: The devices of this process. Only those that keep what was pinned are of interest: not CPU devices.

    Raises:
      ConfigError: The host has less memory that can be pinned.
    """
    if size is None or devices[0].platform == "cpu":
        yield
        return
    pinning = Pinning(size, devices)
    try:
        yield
    except BaseException:
        pinning.cancel()
        raise
    pinning.finish()


class Pinning:
    """A thread that pins the memory of all blocks of a tier; it starts at once."""

    def __init__(self, size: HostCacheSize, devices: Sequence[jax.Device]):
        self.num_pinned = 0  # blocks
        self._size, self._devices = size, devices
        self._is_cancelled = False
        self._thread = ThreadPoolExecutor(1, "pin host memory")
        self._pinned = self._thread.submit(self._run)

    def cancel(self) -> None:
        """Ends the thread after the block that it is pinning."""
        self._is_cancelled = True
        self._thread.shutdown()

    def finish(self) -> None:
        """Waits until all memory is pinned.

        Raises:
          ConfigError: The host has less memory that can be pinned.
        """
        try:
            self._pinned.result()
        except jax.errors.JaxRuntimeError as error:
            pinned, whole = self._gib(self.num_pinned), self._gib(self._size.num_blocks)
            raise ConfigError(
                f"only {pinned:.1f} of the {whole:.1f} GiB of host_cache_gib could be pinned: {error}. Lower "
                "host_cache_gib, or raise the limit that is in its way: the memory of the machine or container, its "
                "limit of locked memory (ulimit -l), or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, if it is set."
            ) from None
        finally:
            self._thread.shutdown()

    def _gib(self, num_blocks: int) -> float:
        return num_blocks * self._size.block_bytes * len(self._devices) / _GIB

    def _run(self) -> None:
        started = logged = time.monotonic()
        whole = self._gib(self._size.num_blocks)
        _log.info("pinning %.1f GiB of host memory for host_cache_gib", whole)
        held = []
        where = host_shardings(self._devices)
        zeros = [jnp.zeros(self._size.block_bytes, jnp.uint8, device=device) for device in self._devices]
        while self.num_pinned < self._size.num_blocks and not self._is_cancelled and where is not None:
            held.append(jax.block_until_ready(jax.device_put(zeros, where)))
            self.num_pinned += 1
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                _log.info("pinned %.1f of %.1f GiB of host memory", self._gib(self.num_pinned), whole)
        _log.info("pinned %.1f GiB of host memory in %.1f s", self._gib(self.num_pinned), time.monotonic() - started)
