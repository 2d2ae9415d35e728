"""How the GPU kernel's work is cut: tiles of consecutive tokens of one request, the longest first.

Computed on the device by plain jax.numpy, once a step: XLA sees that every layer asks for the same.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from . import PagedBatch


@partial(jax.jit, static_argnames="tile_tokens")
def plan_tiles(batch: "PagedBatch", *, tile_tokens: int) -> jax.Array:
    """[tiles, 4] int32: a tile's first token, number of tokens, position of the first one, request.

    Tiles with more keys stand first, places that are not used (all 0) last. Padding tokens are in no tile.
    """
    positions, token_request, page_table = batch
    num_tokens, num_requests = positions.shape[0], page_table.shape[0]
    requests = jnp.arange(num_requests, dtype=jnp.int32)
    is_of = (token_request == requests[:, None]) & (positions >= 0)  # [B, T]
    counts = is_of.sum(axis=1, dtype=jnp.int32)
    far = jnp.int32(jnp.iinfo(jnp.int32).max)
    first_token = jnp.where(is_of, jnp.arange(num_tokens, dtype=jnp.int32), far).min(axis=1)
    first_position = jnp.where(is_of, positions, far).min(axis=1)

    tile_counts = -(-counts // tile_tokens)
    ends = jnp.where(requests <= requests[:, None], tile_counts, 0).sum(axis=1, dtype=jnp.int32)
    tiles = jnp.arange(min(num_tokens, num_tokens // tile_tokens + num_requests), dtype=jnp.int32)
    request = (ends <= tiles[:, None]).sum(axis=1, dtype=jnp.int32)
    is_used = request < num_requests
    request = jnp.minimum(request, num_requests - 1)
    offset = (tiles - (ends - tile_counts)[request]) * tile_tokens
    length = jnp.minimum(tile_tokens, counts[request] - offset)
    fields = jnp.stack([first_token[request] + offset, length, first_position[request] + offset, request], axis=1)
    fields = jnp.where(is_used[:, None], fields, 0)

    num_keys = fields[:, 1] + fields[:, 2]
    is_before = (num_keys > num_keys[:, None]) | ((num_keys == num_keys[:, None]) & (tiles < tiles[:, None]))
    return jnp.zeros_like(fields).at[is_before.sum(axis=1)].set(fields, unique_indices=True)
