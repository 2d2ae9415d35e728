"""Tests that a host tier's memory is pinned beside other work, and that a host without that memory is named."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.host_cache import pinning
from meshserve.runtime.host_cache.sizes import HostCacheSize

SIZE = HostCacheSize(num_blocks=5, block_pages=2, page_bytes=1 << 16, max_fetches=2, max_saves=2)


def test_every_block_is_pinned_on_every_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pinned = pinning.Pinning(SIZE, jax.devices()[:2])
    pinned.finish()
    assert pinned.num_pinned == SIZE.num_blocks
    assert "pinned 0.0 GiB of host memory in" in caplog.text


def test_too_little_memory_is_told_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_after(2, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"only 0.0 of the 0.0 GiB of host_cache_gib .* RESOURCE_EXHAUSTED.*ulimit -l"
    ):
        with pinning.pinned_beside(SIZE, [gpu_like()]):
            pass


def test_what_the_memory_is_pinned_beside_fails_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_after(0, monkeypatch)
    with pytest.raises(OSError, match="no such checkpoint"), pinning.pinned_beside(SIZE, [gpu_like()]):
        raise OSError("no such checkpoint")


@pytest.mark.parametrize("size", [None, SIZE])
def test_cpu_devices_and_servers_without_a_tier_pin_nothing(
    size: HostCacheSize | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "Pinning", None)
    with pinning.pinned_beside(size, jax.devices()):
        pass


def gpu_like() -> Any:
    return SimpleNamespace(platform="gpu", addressable_memories=lambda: [SimpleNamespace(kind=pinning.PINNED)])


def fail_after(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the host run out of memory after `num_blocks` blocks."""
    num_left = num_blocks

    def put(arrays: Sequence[object], _: object) -> Sequence[object]:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")
        return arrays

    monkeypatch.setattr(pinning, "host_shardings", lambda devices: [None] * len(devices))
    monkeypatch.setattr(pinning.jnp, "zeros", lambda *shape, device: 0)
    monkeypatch.setattr(pinning.jax, "device_put", put)
