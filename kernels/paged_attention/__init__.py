"""Attention of a ragged batch over a paged KV cache, on one device's block.

A step's tokens stand in one row: request after request, each with one token (a decode) or more (a prefill chunk), any
mixture in one call. First each token's key and value are written to the cache, then every token attends to the
positions of its request up to its own.

Dimensions: T tokens, B requests, K kv heads of this block, G query heads a kv head, H head dim, L layers, P pages,
S page size (tokens a page).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from . import gpu, reference, tpu, tpu_write


class PagedBatch(NamedTuple):
    """Which token belongs where. Padding: a token at position -1; a request without tokens."""

    positions: jax.Array  # [T] int32: of the token in its request, from 0; -1 for padding
    token_request: jax.Array  # [T] int32: index of the token's request in this batch
    page_table: jax.Array  # [B, max_pages] int32: entries beyond what a request owns are never used


class PagedAttention(Protocol):
    """An implementation. It must not let the contents of pages a request does not own into its result, NaN included."""

    def __call__(
        self, q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
    ) -> jax.Array:
        """Args: q [T, K, G, H]; cache [L, P, K, 2, S, H]; `scale` multiplies the scores. Returns [T, K, G, H] in q's
        dtype: softmax(q k^T * scale) v over positions 0..positions[t], accumulated in float32; 0 for padding tokens.
        """
        ...


class WriteKV(Protocol):
    """Puts a step's keys and values into the cache; `write_kv` is the meaning."""

    def __call__(
        self, cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, *, layer: int | jax.Array
    ) -> jax.Array: ...


def write_kv(cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, *, layer: int | jax.Array) -> jax.Array:
    """Writes each token's key and value (k, v [T, K, H]) to its place in the cache [L, P, K, 2, S, H].

    Padding tokens write nothing. In place when the cache is donated.
    """
    num_pages, page_size = cache.shape[1], cache.shape[4]
    is_padding = batch.positions < 0
    positions = jnp.maximum(batch.positions, 0)
    page = batch.page_table[batch.token_request, positions // page_size]
    page = jnp.where(is_padding, num_pages, page)  # out of range: dropped
    return cache.at[layer, page, :, :, positions % page_size].set(
        jnp.stack([k, v], axis=2).astype(cache.dtype), mode="drop"
    )


class HeadSettings(NamedTuple):
    """What the heads of every layer of a step are prepared with."""

    q_norm: jax.Array  # [L, H]: gains of the query heads' RMSNorm
    k_norm: jax.Array  # [L, H]
    cos: jax.Array  # [T, H / 2] float32: of the rotary angles
    sin: jax.Array
    epsilon: float  # added to the mean square in each RMSNorm


class PrepareHeads(Protocol):
    """All that lies between the projection to query, key and value and attention, in one pass."""

    def __call__(
        self, rows: jax.Array, cache: jax.Array, batch: PagedBatch, settings: HeadSettings, *, layer: int | jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Args: rows [T, K * (G + 2) * H], of each kv head its query heads, then its key, then its value; cache
        [L, P, K, 2, S, H]. Returns q [T, K, G, H], normalised and turned to its position, and the cache with each
        token's key, treated likewise, and value; padding tokens write nothing and their q means nothing."""
        ...


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.paged_attention,
    "cuda": gpu.paged_attention,
    "tpu": tpu.paged_attention,
    "tpu_interpreted": tpu.interpreted,
}
# Where XLA's own scatter, `write_kv`, is not the best.
WRITERS: dict[str, WriteKV] = {"tpu": tpu_write.write_kv, "tpu_interpreted": tpu_write.interpreted}
# Where one pass over the heads beats what XLA makes of their parts.
PREPARERS: dict[str, PrepareHeads] = {"cuda": gpu.prepare_heads}


def implementation(name: str, device: jax.Device | None = None) -> PagedAttention:
    """The named implementation for a device, this process's first if None: "reference" (any backend), "cuda" (Hopper,
    bfloat16), "tpu", or "tpu_interpreted" (the TPU kernel in Pallas' interpreter, which checks its copies: any backend,
    for tests, thousands of times slower).

    Raises:
      ValueError: there is no such implementation, or it cannot run there; says why.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"attention is {name!r}; this build has {', '.join(IMPLEMENTATIONS)}.")
    reason = gpu.unavailable_reason(device) if name == "cuda" else None
    if reason:
        raise ValueError(f"attention 'cuda' cannot run: {reason}. Take 'reference'.")
    platform = jax.default_backend() if device is None else device.platform
    if name == "tpu" and platform != "tpu":
        raise ValueError(f"attention 'tpu' cannot run: the backend is {platform}. Take 'reference'.")
    return IMPLEMENTATIONS[name]
