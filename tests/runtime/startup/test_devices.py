"""Tests how much host memory jax may pin for a host tier, and options that jax needs before it starts."""

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.devices import _pinned_bytes, configure_devices

GIB = 1 << 30


@pytest.mark.parametrize(
    ("host_cache_gib", "free_gib", "pinned_gib"),
    [(40, 200, 42), (40, 45.5, 41.5), (40, 42, 41), (4, 100, 24), (4, 20, 16)],
    ids=["a large tier", "what the host has", "the tier at least", "room to move weights", "some of it"],
)
def test_jax_may_pin_the_tier_and_what_weights_need_but_leaves_the_host_some(
    host_cache_gib: float, free_gib: float, pinned_gib: float
) -> None:
    assert _pinned_bytes(host_cache_gib, free_gib * GIB) == pinned_gib * GIB


def test_another_number_of_cpu_devices_in_a_running_process_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match=r"cpu_devices is 4, but JAX already runs .* with 8 device\(s\)"):
        configure_devices(ServeConfig(model="demo", cpu_devices=4))
