"""Prologues of matrix products: operations on activations that an implementation can fuse with the rounding to FP8.

Called, each computes its result in XLA operations. Dimensions: T tokens, K columns of the matrix.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Prologue = Callable[[jax.Array], jax.Array]


def rms_norm(x: jax.Array, gain: jax.Array, epsilon: float, inverse: jax.Array | None = None) -> jax.Array:
    """Computes x / rms(x) * gain over the last axis.

    Statistics are float32; the result has x's dtype. `inverse` is 1 / rms(x), if already known.
    """
    inverse = inverse_rms(x, epsilon) if inverse is None else inverse
    return gain * (x.astype(jnp.float32) * inverse).astype(x.dtype)


def inverse_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Computes 1 / rms(x) over the last axis in float32. The last axis is kept with size 1."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)


@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """The norm x / rms(x) * gain of each token."""

    gain: jax.Array  # [K]
    epsilon: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [T, K]."""
        return rms_norm(x, self.gain, self.epsilon)


def silu_product(x: jax.Array) -> jax.Array:
    """Computes SwiGLU's activation [T, K] of x [T, 2 K]: SiLU of the first half of the columns, times the second."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up
