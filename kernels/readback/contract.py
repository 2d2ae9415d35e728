"""The contract of the readback of sampled tokens, and how an implementation is described."""

import dataclasses
from typing import Protocol

import jax

from meshserve.kernels.implementation import Implementation


class TokenReadback(Protocol):
    """The part of a program."""

    def __call__(self, tokens: jax.Array, step_number: jax.Array) -> jax.Array:
        """Returns the tokens [B] int32, and writes them to pinned host memory if `step_number` [1] int32 is not 0."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadbackImplementation(Implementation[int]):
    """An implementation for programs over a number of devices."""

    write_tokens: TokenReadback
