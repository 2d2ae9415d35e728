"""Attention of a ragged batch over a paged KV cache, on one device's block.

The tokens of a step are concatenated request by request. A request has one token (a decode) or several (a prefill
chunk), and a step may mix both. First each token's key and value are written to the cache, then every token attends to
the positions of its request up to its own.

Dimensions: T tokens, B requests, K kv heads of this block, G query heads per kv head, H head dim, L layers, P pages,
S page size (tokens per page).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from . import gpu, reference, tpu, tpu_write
from .storage import as_bits, from_bits, to_cache


class PagedBatch(NamedTuple):
    """Maps tokens to requests and requests to pages. Padding is a token at position -1 or a request without tokens."""

    positions: jax.Array  # [T] int32: position of the token in its request, from 0; -1 for padding
    token_request: jax.Array  # [T] int32: index of the token's request in this batch
    page_table: jax.Array  # [B, max_pages] int32: entries beyond the pages that a request owns are never used


class PagedAttention(Protocol):
    """The interface of an implementation.

    The contents of pages that a request does not own, even NaN, must not affect its result.
    """

    def __call__(
        self, q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
    ) -> jax.Array:
        """Computes softmax(q k^T * scale) v over positions 0..positions[t] for each token t.

        Args:
          q: [T, K, G, H].
          cache: [L, P, K, 2, S, H], with this step's keys and values already written; in q's dtype, or e4m3 where the
            implementation supports it.
          batch: the tokens and requests of the step.
          layer: index of the layer.
          scale: multiplies the scores.

        Returns:
          [T, K, G, H] in q's dtype, accumulated in float32; 0 for padding tokens.
        """
        ...


class PartialAttention(Protocol):
    """The interface of an implementation whose results for parts of the keys can be merged: see `context_split`."""

    def __call__(
        self, q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        """Computes `PagedAttention` and, [T, K, G] float32, the logarithm of each query's sum of exp(scores).

        The latter is unspecified for padding tokens.
        """
        ...


class WriteKV(Protocol):
    """The interface of an operation that writes a step's keys and values to the cache; `write_kv` is the reference."""

    def __call__(
        self, cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, *, layer: int | jax.Array
    ) -> jax.Array: ...


def write_kv(cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, *, layer: int | jax.Array) -> jax.Array:
    """Writes each token's key and value (k, v [T, K, H]) to its place in the cache [L, P, K, 2, S, H].

    Padding tokens write nothing. The cache is updated in place if it is donated.
    """
    num_pages, page_size = cache.shape[1], cache.shape[4]
    is_padding = batch.positions < 0
    positions = jnp.maximum(batch.positions, 0)
    page = batch.page_table[batch.token_request, positions // page_size]
    page = jnp.where(is_padding, num_pages, page)  # out of range, so the write is dropped
    fresh = as_bits(to_cache(jnp.stack([k, v], axis=2), cache.dtype))
    written = as_bits(cache).at[layer, page, :, :, positions % page_size].set(fresh, mode="drop")
    return from_bits(written, cache.dtype)


class RopeSettings(NamedTuple):
    """Parameters of the heads' RMSNorm and rotary embedding, shared by all layers of a step."""

    q_norm: jax.Array  # [L, H]: gain of the query heads' RMSNorm
    k_norm: jax.Array  # [L, H]: gain of the key heads' RMSNorm
    cos: jax.Array  # [T, H / 2] float32: cosines of the rotary angles
    sin: jax.Array  # [T, H / 2] float32
    epsilon: float  # added to the mean square in each RMSNorm


class QKNormRope(Protocol):
    """The interface of an operation that does everything between the QKV projection and attention in one pass."""

    def __call__(
        self,
        rows: jax.Array,
        cache: jax.Array,
        batch: PagedBatch,
        settings: RopeSettings,
        *,
        layer: int | jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Normalizes and rotates queries and keys, and writes keys and values to the cache.

        Args:
          rows: [T, K * (G + 2) * H]: for each kv head, its query heads, then its key, then its value.
          cache: [L, P, K, 2, S, H].
          batch: the tokens and requests of the step.
          settings: parameters of the norms and the rotary embedding.
          layer: index of the layer.

        Returns:
          q [T, K, G, H], normalized and rotated, also of padding tokens, and the cache with each token's key
          (normalized and rotated) and value. Padding tokens write nothing.
        """
        ...


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.paged_attention,
    "cuda": gpu.paged_attention,
    "tpu": tpu.paged_attention,
    "tpu_interpreted": tpu.interpreted,
}
PARTIAL: dict[str, PartialAttention] = {
    "reference": reference.partial_attention,
    "cuda": gpu.partial_attention,
    "tpu": tpu.partial_attention,
    "tpu_interpreted": tpu.partial_interpreted,
}
# Implementations that are faster than XLA's own scatter, `write_kv`.
WRITERS: dict[str, WriteKV] = {"tpu": tpu_write.write_kv, "tpu_interpreted": tpu_write.interpreted}
# Implementations for which a single pass over the heads is faster than XLA's separate operations.
QK_NORM_ROPE: dict[str, QKNormRope] = {"cuda": gpu.qk_norm_rope}


def implementation(name: str, device: jax.Device | None = None) -> PagedAttention:
    """Returns the named implementation.

    Args:
      name: "reference" (any backend), "cuda" (Hopper, bfloat16), "tpu", or "tpu_interpreted" (the TPU kernel in Pallas'
        interpreter, which checks its copies; runs on any backend, for tests, thousands of times slower).
      device: the device that it must run on; None means this process's first device.

    Raises:
      ValueError: there is no such implementation, or it cannot run on the device; the message says why.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"attention is {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    reason = gpu.unavailable_reason(device) if name == "cuda" else None
    if reason:
        raise ValueError(f"attention 'cuda' cannot run: {reason}. Use 'reference'.")
    platform = jax.default_backend() if device is None else device.platform
    if name == "tpu" and platform != "tpu":
        raise ValueError(f"attention 'tpu' cannot run: the backend is {platform}. Use 'reference'.")
    return IMPLEMENTATIONS[name]
