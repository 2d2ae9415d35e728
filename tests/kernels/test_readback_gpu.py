"""Tests on a Hopper GPU that the tokens in pinned memory are those of the device, also for programs in a CUDA graph."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.readback import cuda

from .comparing import assert_has_values

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("num_tokens", [1, 4, 256, 1024])
def test_each_step_has_its_tokens(num_tokens: int) -> None:
    pinned = cuda.PinnedTokens(jax.devices()[0])

    @jax.jit
    def step(x: jax.Array, step_number: jax.Array) -> jax.Array:
        for _ in range(8):  # so that there are enough kernels for a graph
            x = jnp.cumsum(x, dtype=jnp.int32) % 1_000_003
        return cuda.write_tokens(x, step_number) + 0 * step_number

    draw = np.random.default_rng(0)
    flights = []
    for _ in range(40):
        step_number = pinned.next_step_number()
        tokens = step(draw.integers(0, 1 << 20, num_tokens, np.int32), np.array([step_number], np.int32))
        flights.append((cuda.PendingTokens(pinned, step_number, tokens), tokens))
        if len(flights) > 3:
            pending, tokens = flights.pop(0)
            assert_has_values(tokens)
            np.testing.assert_array_equal(np.asarray(pending), np.asarray(tokens))
    assert set(pinned.seconds) == {num_tokens}
