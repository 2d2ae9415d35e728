"""Rotary position embedding: unscaled, linearly scaled, and YaRN (arXiv 2309.00071)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ...model_files.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the rotation in radians per position of each pair of head dimensions, [head_dim / 2] float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    plain = (1.0 / rope.theta**exponents).astype(np.float32)
    if rope.kind == "default":
        return plain
    scaled = plain / np.float32(rope.factor)
    if rope.kind == "linear":
        return scaled
    low, high = _yarn_range(rope, head_dim)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    is_scaled = np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
    return (scaled * is_scaled + plain * (1.0 - is_scaled)).astype(np.float32)


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Returns the range of pairs over which YaRN blends from unscaled (fast) to scaled (slow) frequencies."""

    def pair_turning(num_turns: float) -> float:
        """Returns the pair that makes this many turns over the original context."""
        wavelength = rope.original_max_positions / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes cosine and sine for each token: positions [T] -> two arrays [T, head_dim / 2] float32."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of x [T, ..., H] by the angles of each token.

    Computed in float32; the result has x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    shape = (x.shape[0], *([1] * (x.ndim - 2)), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
