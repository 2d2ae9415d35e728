"""Attention over a context whose tokens are divided among several devices, each of which computes its part.

With N devices, device r holds the tokens at positions r, r + N, r + 2 N, ... of every request, each at position // N.
 So a page of S tokens is S / N rows on each device, under the same number. A query at position p sees the
first (p - r) // N + 1 of a device's rows. Queries at consecutive positions therefore do not see consecutive numbers of
rows, as the kernels require of a request, but every N-th does: `by_remainder` reorders the tokens of a step so that
each request becomes N requests in which they do.

This module knows nothing of meshes: which device it is, and how queries and results are exchanged, is the caller's.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from . import PagedBatch


class Reordered(NamedTuple):
    """The tokens of a step in another order."""

    order: jax.Array  # [T] int32: the token at each new place
    places: jax.Array  # [T] int32: the new place of each token
    batch: "PagedBatch"  # in the new order, with N requests for each


def by_remainder(batch: "PagedBatch", num_parts: int) -> Reordered:
    """Orders the tokens of each request by their position modulo `num_parts`, as a request for each remainder.

    Padding comes last. A request without tokens of a remainder leaves a request without tokens.
    """
    positions, token_request, page_table = batch
    requests = token_request * num_parts + jnp.maximum(positions, 0) % num_parts
    last = page_table.shape[0] * num_parts
    order = jnp.argsort(jnp.where(positions < 0, last, requests), stable=True).astype(jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)
    moved = batch._replace(
        positions=positions[order],
        token_request=requests[order],
        page_table=jnp.repeat(page_table, num_parts, axis=0),
    )
    return Reordered(order, places, moved)


def seen_by(batch: "PagedBatch", part: int | jax.Array, num_parts: int) -> "PagedBatch":
    """Returns the batch for attention over one part: the positions are those of the last rows that queries see.

    A query that sees none becomes padding.
    """
    seen = (batch.positions - part) // num_parts
    return batch._replace(positions=jnp.where(batch.positions < 0, -1, seen))


def held_by(batch: "PagedBatch", part: int | jax.Array, num_parts: int) -> "PagedBatch":
    """Returns the batch for writing the keys and values that belong to one part; other tokens become padding."""
    is_held = (batch.positions >= 0) & (batch.positions % num_parts == part)
    return batch._replace(positions=jnp.where(is_held, batch.positions // num_parts, -1))


def packed(attended: jax.Array, sums: jax.Array, batch: "PagedBatch") -> jax.Array:
    """Packs the bits of a result of `PartialAttention` into one array of integers [T, K, G, H + n].

    Args:
      attended, sums: The result, for a batch of `seen_by`.
      batch: That batch.
    """
    unsigned = jnp.dtype(f"uint{8 * attended.dtype.itemsize}")
    sums = jnp.where(batch.positions[:, None, None] < 0, -jnp.inf, sums)
    bits = jax.lax.bitcast_convert_type(sums, unsigned).reshape(*sums.shape, -1)
    return jnp.concatenate([jax.lax.bitcast_convert_type(attended, unsigned), bits], axis=-1)


def merged(parts: jax.Array, head_dim: int, dtype: jnp.dtype) -> jax.Array:
    """Merges packed results [N, T, K, G, H + n] of all parts into [T, K, G, H] of `dtype`; 0 for padding."""
    attended = jax.lax.bitcast_convert_type(parts[..., :head_dim], dtype).astype(jnp.float32)
    bits = parts[..., head_dim:]
    sums = jax.lax.bitcast_convert_type(bits if bits.shape[-1] > 1 else bits[..., 0], jnp.float32)
    highest = sums.max(axis=0)
    weights = jnp.exp(sums - jnp.where(jnp.isfinite(highest), highest, 0.0))
    weighted = (weights[..., None] * attended).sum(axis=0)
    return (weighted / jnp.maximum(weights.sum(axis=0), 1e-30)[..., None]).astype(dtype)
