"""Reference implementation of paged attention in plain jax.numpy, for any backend.

It gathers one page of every request at a time and folds it into an online softmax (Milakov and Gimelshein, 2018). The
number of iterations is the page count of the step's longest request, and the full score matrix is never materialized.
"""

import math

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost

from .contract import AttentionImplementation, AttentionShapes, AttentionStep, PagedBatch
from .storage import as_bits, from_bits, to_cache

# On a GPU. XLA does not put a loop whose end the device knows in a graph: the host launches the kernels of every pass
# (about ten, with the copy by which it learns whether there is another) and waits for each.
_LAUNCHES_PER_PASS = 10


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


def paged_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
) -> jax.Array:
    """See `PagedAttention`."""
    return partial_attention(q, cache, batch, layer=layer, scale=scale)[0]


def partial_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
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

    num_pages = (jnp.max(batch.positions) + page_size) // page_size  # pages of the longest request
    start = (jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape, jnp.float32))
    highest, total, weighted = jax.lax.fori_loop(0, num_pages, fold_page, start)
    return (weighted / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype), highest + jnp.log(total)


def cost(shapes: AttentionShapes, step: AttentionStep) -> Cost:
    """Estimates the cost on a GPU, where each pass of the loop is a few kernels that pass arrays through memory.

    Every token takes part in the passes of the longest request. In each it reads a page of its request's keys and
    values, writes it in float32, and reads that for scores and weighted sums, which are updated in memory. No page is
    shared by tokens or query heads, and products are those of float32, which have no matrix units.
    """
    num_passes = math.ceil(step.longest / shapes.page_size)
    page_values = shapes.kv_heads * 2 * shapes.page_size * shapes.head_dim
    heads = shapes.kv_heads * shapes.group
    page_bytes = page_values * (shapes.cache_dtype.itemsize + 4 + 4)
    score_bytes = 4 * heads * shapes.page_size * 4  # written and read, before and after exp
    sum_bytes = 3 * heads * shapes.head_dim * 4  # the weighted values: a product, and the update of their sum
    return Cost(
        num_bytes=step.num_tokens * num_passes * (page_bytes + score_bytes + sum_bytes),
        float32_operations=step.num_tokens * num_passes * shapes.page_size * shapes.pair_operations,
        num_launches=_LAUNCHES_PER_PASS * num_passes,
        scratch_bytes=step.num_tokens * page_values * (shapes.cache_dtype.itemsize + 4),
    )


IMPLEMENTATION = AttentionImplementation(
    name="reference",
    automatic_on=("cpu", "gpu", "tpu"),
    bytes_reached=0.7,  # by prompts of 1,024 tokens of Qwen3-8B on an H200; decode was not measured
    attend=paged_attention,
    attend_part=partial_attention,
    write=write_kv,
    cost=cost,
)
