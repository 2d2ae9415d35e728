"""8-bit floats (e4m3): an element is the number times the scale of its rectangle."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .contract import SCALE, Array, Format

FP8 = jnp.dtype("float8_e4m3fn")
FP8_MAX = 448.0  # the largest e4m3 number; larger ones would become NaN when converted


class _E4M3(Format):
    name, dtype, storage = "fp8", FP8, FP8
    typical = {SCALE: 1.0}

    def elements(self, numbers: Array, grids: Mapping[str, Array]) -> Array:
        """See `Format`."""
        return numbers * grids[SCALE]


E4M3 = _E4M3()


def to_fp8(x: jax.Array) -> jax.Array:
    """Rounds to e4m3. Numbers beyond its range become the largest one of their sign."""
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)


def quantized_activations(x: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Rounds activations [T, K] to FP8 with a scale for each token and `columns` columns.

    Returns:
      The numbers [T, K] and the scales [T, K / columns] float32.
    """
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, columns)
    highest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = jnp.where(highest > 0.0, highest / FP8_MAX, 1.0)
    # Without the barrier, XLA's GPU compiler may skip the rounding where the numbers are converted back.
    numbers = jax.lax.optimization_barrier(to_fp8(groups / scale))
    return numbers.reshape(x.shape), scale[..., 0]
