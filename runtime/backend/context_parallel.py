"""Attention where neighboring devices divide the pages of the KV head that they would otherwise repeat.

Each of `ShardLayout.cp` devices holds a part of every page's tokens, and computes a part of the query heads that read
the KV head. In each layer they gather the queries of all these heads, attend to their own tokens, exchange the results,
and merge those of their own heads.
"""

from collections.abc import Callable
from typing import Any

import jax

from meshserve.kernels.paged_attention import PagedBatch, PartialAttention, WriteKV
from meshserve.kernels.paged_attention.context_split import held_by, merged, packed, seen_by
from meshserve.sharding.collectives import exchange_with_neighbors, gather_from_neighbors
from meshserve.sharding.mesh import TENSOR_AXIS


def divide_pages(
    batch: PagedBatch, cp: int, attend_part: PartialAttention, write: WriteKV, prepare: Callable[..., Any] | None
) -> dict[str, Any]:
    """Returns the operations of a step over pages that `cp` devices divide, as "attend", "write" and "prepare".

    Args:
      batch: Consecutive tokens of a request are `cp` positions apart; see `by_remainder`.
      attend_part: The attention to this device's tokens.
      prepare: `QKNormRope` with its settings. If None, so is the result's.
    """
    part = jax.lax.axis_index(TENSOR_AXIS) % cp
    seen, held = seen_by(batch, part, cp), held_by(batch, part, cp)

    def attend(q: jax.Array, cache: jax.Array, batch: PagedBatch, **settings: Any) -> jax.Array:
        heads = gather_from_neighbors(q, cp, axis=2)
        results = packed(*attend_part(heads, cache, seen, **settings), seen)
        return merged(exchange_with_neighbors(results, cp, axis=2), q.shape[-1], q.dtype)

    def write_held(cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, **settings: Any) -> jax.Array:
        return write(cache, k, v, held, **settings)

    def prepare_held(rows: jax.Array, cache: jax.Array, batch: PagedBatch, **settings: Any) -> Any:
        assert prepare is not None
        return prepare(rows, cache, held, **settings)

    return {"attend": attend, "write": write_held, "prepare": None if prepare is None else prepare_held}
