"""Contract of the way by which a step's tokens reach the host without a copy that the host has to wait for.

A step gets a number. Its program passes the tokens through `MailTokens`, and a `Letter` on the host waits for the
tokens of that number. An implementation serves programs of one device. Without one, or for steps of number 0, tokens
are fetched as any array of the device.
"""

from typing import Protocol

import jax


class MailTokens(Protocol):
    """The part of a program."""

    def __call__(self, tokens: jax.Array, number: jax.Array) -> jax.Array:
        """Returns the tokens [B] int32 unchanged, and sends them to the host if `number` [1] int32 is not 0."""
