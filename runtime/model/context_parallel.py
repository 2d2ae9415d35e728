"""Attention where neighboring devices divide the pages of the KV head that they would otherwise repeat.

Each of `ShardLayout.cp` devices holds a part of every page's tokens, and computes a part of the query heads that read
the KV head. In each layer they gather the queries of all these heads, attend to their own tokens, exchange the results,
and merge those of their own heads.
"""

from typing import TYPE_CHECKING, Any

import jax

from meshserve.kernels.paged_attention import PagedBatch, PartialAttention
from meshserve.kernels.paged_attention.context_split import held_by, merged, packed, seen_by
from meshserve.sharding.collectives import exchange_with_neighbors, gather_from_neighbors
from meshserve.sharding.mesh import TENSOR_AXIS

if TYPE_CHECKING:
    from .qwen3 import StepContext


def divide_pages(context: "StepContext", cp: int, attend_part: PartialAttention) -> "StepContext":
    """Returns the context of a step with attention and writing over pages that `cp` devices divide.

    Args:
      context: The context. Consecutive tokens of a request in its batch are `cp` positions apart; see `by_remainder`.
      cp: Number of neighboring devices.
      attend_part: The attention to this device's tokens.
    """
    part = jax.lax.axis_index(TENSOR_AXIS) % cp
    seen, held = seen_by(context.batch, part, cp), held_by(context.batch, part, cp)
    write_held, prepare_held = context.write, context.prepare

    def attend(q: jax.Array, cache: jax.Array, batch: PagedBatch, **settings: Any) -> jax.Array:
        heads = gather_from_neighbors(q, cp, axis=2)
        results = packed(*attend_part(heads, cache, seen, **settings), seen)
        return merged(exchange_with_neighbors(results, cp, axis=2), q.shape[-1], q.dtype)

    def write(cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, **settings: Any) -> jax.Array:
        return write_held(cache, k, v, held, **settings)

    def prepare(rows: jax.Array, cache: jax.Array, batch: PagedBatch, **settings: Any) -> tuple[jax.Array, jax.Array]:
        assert prepare_held is not None
        return prepare_held(rows, cache, held, **settings)

    return context._replace(attend=attend, write=write, prepare=None if prepare_held is None else prepare)
