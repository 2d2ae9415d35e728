"""Tests on a Hopper GPU that mailed tokens are those of the device, also for programs in a CUDA graph."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.mail import gpu

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("num_tokens", [1, 4, 256, 1024])
def test_letters_have_the_tokens_of_their_step(num_tokens: int) -> None:
    mailbox = gpu.Mailbox(jax.devices()[0])

    @jax.jit
    def step(x: jax.Array, number: jax.Array) -> jax.Array:
        for _ in range(8):  # so that there are enough kernels for a graph
            x = jnp.cumsum(x, dtype=jnp.int32) % 1_000_003
        return gpu.mail_tokens(x, number) + 0 * number

    draw = np.random.default_rng(0)
    flights = []
    for _ in range(40):
        number = mailbox.next_number()
        tokens = step(draw.integers(0, 1 << 20, num_tokens, np.int32), np.array([number], np.int32))
        flights.append((gpu.Letter(mailbox, number, tokens), tokens))
        if len(flights) > 3:
            letter, tokens = flights.pop(0)
            np.testing.assert_array_equal(np.asarray(letter), np.asarray(tokens))
    assert set(mailbox.seconds) == {num_tokens}
