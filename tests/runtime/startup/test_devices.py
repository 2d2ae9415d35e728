"""Tests how much host memory jax may pin for a host tier."""

import pytest

from meshserve.runtime.startup.devices import _pinned_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("host_cache_gib", "free_gib", "pinned_gib"),
    [(40, 200, 56), (40, 52, 48), (40, 42, 41), (0.5, 100, 16.5)],
    ids=["room for weights on their way", "what the host has", "the tier at least", "a small tier"],
)
def test_jax_may_pin_the_tier_and_what_weights_need_but_leaves_the_host_some(
    host_cache_gib: float, free_gib: int, pinned_gib: float
) -> None:
    assert _pinned_bytes(host_cache_gib, free_gib * GIB) == pinned_gib * GIB
