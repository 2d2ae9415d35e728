"""Reference implementation of paged attention in plain jax.numpy, for any backend.

It gathers one page of every request at a time and folds it into an online softmax (Milakov and Gimelshein, 2018). The
number of iterations is the page count of the step's longest request, and the full score matrix is never materialized.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .storage import as_bits, from_bits

if TYPE_CHECKING:
    from . import PagedBatch


def paged_attention(
    q: jax.Array, cache: jax.Array, batch: "PagedBatch", *, layer: int | jax.Array, scale: float
) -> jax.Array:
    """See `PagedAttention`."""
    return partial_attention(q, cache, batch, layer=layer, scale=scale)[0]


def partial_attention(
    q: jax.Array, cache: jax.Array, batch: "PagedBatch", *, layer: int | jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `PartialAttention`."""
    page_size, bits = cache.shape[4], as_bits(cache)
    queries = q.astype(jnp.float32) * scale
    offsets = jnp.arange(page_size)

    def fold_page(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, weighted = carry
        page = batch.page_table[batch.token_request, index]  # [T]
        is_seen = (index * page_size + offsets)[None, :] <= batch.positions[:, None]  # [T, S]
        block = from_bits(bits[layer, page], cache.dtype).astype(jnp.float32)  # [T, K, 2, S, H]
        block = jnp.where(is_seen[:, None, None, :, None], block, 0.0)
        scores = jnp.einsum("tkgh,tksh->tkgs", queries, block[:, :, 0], precision="highest")
        scores = jnp.where(is_seen[:, None, None, :], scores, -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        safe_highest = jnp.where(jnp.isfinite(new_highest), new_highest, 0.0)  # no position seen yet: avoid inf - inf
        weights = jnp.exp(scores - safe_highest[..., None])
        decay = jnp.exp(highest - safe_highest)
        total = total * decay + weights.sum(axis=-1)
        seen = jnp.einsum("tkgs,tksh->tkgh", weights, block[:, :, 1], precision="highest")
        return new_highest, total, weighted * decay[..., None] + seen

    num_pages = (jnp.max(batch.positions) + page_size) // page_size  # of the longest request
    start = (jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape, jnp.float32))
    highest, total, weighted = jax.lax.fori_loop(0, num_pages, fold_page, start)
    return (weighted / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype), highest + jnp.log(total)
