"""Converts keys and values to the dtype of the cache, which may have 8 bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

FP8 = jnp.dtype("float8_e4m3fn")
_FP8_MAX = 448.0


def to_cache(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds keys or values to the dtype of the cache. Those beyond the range of e4m3 become its largest number."""
    if dtype == FP8:
        values = jnp.clip(values, -_FP8_MAX, _FP8_MAX)
    return values.astype(dtype)


def scaled_access(
    attend: Callable[..., jax.Array], write: Callable[..., jax.Array], scale: jax.Array
) -> dict[str, Any]:
    """Returns attention and writing for a cache that holds keys and values divided by scales, if it has 8 bits.

    Args:
      attend: The attention (`PagedAttention`), which sees the divided keys and values.
      write: The writing (`WriteKV`).
      scale: [K, 2] float32, of each KV head's keys and values.

    Returns:
      The same two operations with scales, as "attend" and "write". For other caches they do nothing else than before.
    """
    k_scale, v_scale = scale[:, 0, None], scale[:, 1, None]

    def scaled_attend(q: jax.Array, cache: jax.Array, batch: Any, **settings: Any) -> jax.Array:
        if cache.dtype != FP8:
            return attend(q, cache, batch, **settings)
        attended = attend((q * k_scale[..., None]).astype(q.dtype), cache, batch, **settings)
        return (attended * v_scale[..., None]).astype(q.dtype)

    def scaled_write(cache: jax.Array, k: jax.Array, v: jax.Array, batch: Any, **settings: Any) -> jax.Array:
        if cache.dtype != FP8:
            return write(cache, k, v, batch, **settings)
        return write(cache, k / k_scale, v / v_scale, batch, **settings)

    return {"attend": scaled_attend, "write": scaled_write}


def as_bits(cache: jax.Array) -> jax.Array:
    """Returns 8-bit floats as integers of the same bits, and other arrays unchanged.

    XLA for CPUs computes with 8-bit floats in a wider type and would hold the whole cache in it, four times as large.
    It still copies the bits once in each step.
    """
    return jax.lax.bitcast_convert_type(cache, jnp.uint8) if cache.dtype == FP8 else cache


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Reverses `as_bits`."""
    return jax.lax.bitcast_convert_type(bits, FP8) if dtype == FP8 else bits
