"""Contract of the zero-copy readback of sampled tokens through pinned host memory.

A step has a number. Its program passes the tokens through a `TokenReadback`, and `PendingTokens` on the host wait for
those of that number. An implementation serves programs of one device. Without one, or for steps of number 0, tokens are
copied like any array of the device.
"""

from typing import Protocol

import jax


class TokenReadback(Protocol):
    """The part of a program."""

    def __call__(self, tokens: jax.Array, step_number: jax.Array) -> jax.Array:
        """Returns the tokens [B] int32, and writes them to pinned host memory if `step_number` [1] int32 is not 0."""
