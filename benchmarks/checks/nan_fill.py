"""A pytest plugin that fills the free memory of the GPU with NaN before each test.

    python -m pytest -p meshserve.benchmarks.checks.nan_fill tests/kernels/test_qk_norm_rope_gpu.py

A kernel that reads memory that was never written then computes with NaN (every byte is 255: NaN in float8_e4m3,
bfloat16 and float32, -1 as an integer), and the test's comparison fails. compute-sanitizer's initcheck looks for the
same fault, but does not see what the kernels that it does not watch have written, and did not end one small jitted
program in a minute. jax must keep freed memory instead of returning it to the driver, so XLA_PYTHON_CLIENT_ALLOCATOR
must be unset.
"""

import jax
import jax.numpy as jnp
import pytest

_LEAST_BYTES = 1 << 16  # smaller free parts are left as they are
_FULL_BYTES = 255


def fill_free_memory(device: jax.Device, most_bytes: int, least_bytes: int = _LEAST_BYTES) -> int:
    """Fills what can be allocated on a device with NaN, and frees it again.

    Args:
      device: Its memory is filled, in arrays that halve in size from `most_bytes` until `least_bytes`.
      most_bytes: The size of the first array, and the limit of all together.

    Returns:
      The number of bytes filled.
    """
    held, num_bytes, size = [], 0, most_bytes
    while size >= least_bytes:
        if num_bytes + size > most_bytes:
            size //= 2
            continue
        try:
            held.append(jnp.full(size, _FULL_BYTES, jnp.uint8, device=device).block_until_ready())
            num_bytes += size
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            size //= 2
    return num_bytes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Fills the memory that is free before each test. Skips no test: without a GPU the tests skip themselves."""
    device = jax.devices()[0]
    if device.platform == "gpu":
        limit = device.memory_stats()["bytes_limit"]
        filled = fill_free_memory(device, 1 << (limit.bit_length() - 1))
        assert filled > limit // 4, f"only {filled} of {limit} bytes could be filled with NaN"
