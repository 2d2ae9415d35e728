"""Splits the GPU kernels' work into tiles of consecutive tokens of a request, and the keys of long contexts into parts.

The plan is computed on the device with plain jax.numpy, once per step: XLA recognizes that all layers share it.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from . import PagedBatch

_BLOCK_KEYS = 128  # a part has a multiple of this number of keys
_LEAST_BLOCKS = 4  # minimum blocks per part, because merging parts takes as long as a few blocks
HOPPER_MULTIPROCESSORS = 132  # in an H100 and an H200; with other counts, work is divided less evenly


def split_work(
    batch: "PagedBatch",
    *,
    heads: Sequence[int],
    page_size: int,
    tile_rows: int,
    num_blocks: int = HOPPER_MULTIPROCESSORS,
) -> tuple[jax.Array, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Returns the table of a step's work, and the shapes of the memory for partial results and counters.

    Args:
      batch: The tokens of the step.
      heads: KV heads, query heads per KV head, head dim.
      page_size: Tokens of a page.
      tile_rows: Rows of a kernel's tile: tokens times query heads per KV head.
      num_blocks: Thread blocks that run at the same time.
    """
    (kv_heads, group, head_dim), num_tokens = heads, batch.positions.shape[0]
    tile_tokens = tile_rows // group
    num_shares = count_shares(kv_heads=kv_heads, max_keys=batch.page_table.shape[1] * page_size, num_blocks=num_blocks)
    num_slots = most_slots(num_shares)
    unmerged = (num_slots, kv_heads, min(num_tokens, tile_tokens) * group, head_dim + 4)
    num_counters = max(1 + num_slots * kv_heads * 2, 2 * num_tokens)  # see `operands` for the second size
    scratch = jax.ShapeDtypeStruct(unmerged, jnp.float32), jax.ShapeDtypeStruct((num_counters,), jnp.int32)
    return plan_parts(batch, tile_tokens=tile_tokens, num_shares=num_shares), scratch


def count_shares(*, kv_heads: int, max_keys: int, num_blocks: int = HOPPER_MULTIPROCESSORS) -> int:
    """Returns the number of thread blocks that share a kv head's work, or 0 if no context is long enough to split."""
    return num_blocks // kv_heads if max_keys >= 2 * _LEAST_BLOCKS * _BLOCK_KEYS else 0


def most_slots(num_shares: int) -> int:
    """Returns the maximum total number of parts of all split tiles. A tile of 1.5 shares gets two parts."""
    return num_shares * 4 // 3


@partial(jax.jit, static_argnames=("tile_tokens", "num_shares"))
def plan_parts(batch: "PagedBatch", *, tile_tokens: int, num_shares: int) -> jax.Array:
    """Returns the table of parts that the kernel processes.

    A share is one multiprocessor's part of the whole step's keys. A tile with at least 1.5 shares of keys is split into
    as many parts as it has whole shares, but at least two. Parts with more blocks of keys come first; unused rows (all
    0) come last. Padding tokens belong to no tile.

    Returns:
      [parts, 8] int32 with columns: the tile's first token, its number of tokens, the position of its first token, its
      request, the index of this part, the tile's number of parts, the tile's first slot, and 0.
    """
    positions, token_request, page_table = batch
    num_tokens, num_requests = positions.shape[0], page_table.shape[0]
    requests = jnp.arange(num_requests, dtype=jnp.int32)
    is_of = (token_request == requests[:, None]) & (positions >= 0)  # [B, T]
    counts = is_of.sum(axis=1, dtype=jnp.int32)
    far = jnp.int32(jnp.iinfo(jnp.int32).max)
    first_token = jnp.where(is_of, jnp.arange(num_tokens, dtype=jnp.int32), far).min(axis=1)
    first_position = jnp.where(is_of, positions, far).min(axis=1)

    request, index = _members(-(-counts // tile_tokens), min(num_tokens, num_tokens // tile_tokens + num_requests))
    offset = index * tile_tokens
    length = jnp.minimum(tile_tokens, counts[request] - offset)
    tiles = jnp.stack([first_token[request] + offset, length, first_position[request] + offset, request], axis=1)
    tiles = jnp.where(index[:, None] >= 0, tiles, 0)

    num_blocks = -(-(tiles[:, 1] + tiles[:, 2]) // _BLOCK_KEYS)
    all_blocks = jnp.maximum(num_blocks.sum(dtype=jnp.int32), 1)
    most_parts = jnp.maximum(num_blocks // _LEAST_BLOCKS, 1)
    num_parts = jnp.clip(num_shares * num_blocks // all_blocks, 1, most_parts)
    num_parts = jnp.where(2 * num_shares * num_blocks >= 3 * all_blocks, jnp.clip(num_parts, 2, most_parts), num_parts)
    num_parts = jnp.where(num_blocks > 0, num_parts, 0)
    slots = jnp.where(num_parts > 1, num_parts, 0)
    tile, index = _members(num_parts, tiles.shape[0] + most_slots(num_shares))
    fields = jnp.stack([index, num_parts[tile], (_running_sum(slots) - slots)[tile], jnp.zeros_like(index)], axis=1)
    parts = jnp.where(index[:, None] >= 0, jnp.concatenate([tiles[tile], fields], axis=1), 0)

    cut = jnp.maximum(num_parts[tile], 1)
    size = jnp.where(index >= 0, (index + 1) * num_blocks[tile] // cut - index * num_blocks[tile] // cut, 0)
    order = jnp.arange(size.shape[0], dtype=jnp.int32)
    is_before = (size > size[:, None]) | ((size == size[:, None]) & (order < order[:, None]))
    return jnp.zeros_like(parts).at[is_before.sum(axis=1)].set(parts, unique_indices=True)


def _running_sum(x: jax.Array) -> jax.Array:
    """Returns the inclusive prefix sum of [N] int32 as a single fusion; a scan would take several kernels."""
    order = jnp.arange(x.shape[0])
    return jnp.where(order <= order[:, None], x, 0).sum(axis=1, dtype=jnp.int32)


def _members(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Enumerates the members of N groups, where group i has counts[i] members, one group after the other.

    Returns:
      Each member's group and its index in the group, [size] int32. After the last member the index is -1 and the group
      is arbitrary.
    """
    ends = _running_sum(counts)
    members = jnp.arange(size, dtype=jnp.int32)
    group = (ends <= members[:, None]).sum(axis=1, dtype=jnp.int32)
    is_member = group < counts.shape[0]
    group = jnp.minimum(group, counts.shape[0] - 1)
    return group, jnp.where(is_member, members - (ends - counts)[group], -1)
