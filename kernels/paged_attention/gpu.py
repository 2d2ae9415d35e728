"""Paged attention on an NVIDIA Hopper GPU, in bfloat16: the kernel of ../cuda/prefill.cuh.

Prefill chunks and decodes in one call; memory beside the result is one table of tiles. A tile's keys are walked by one
block of threads, so a lone decode of a long context keeps few multiprocessors busy: steps of decodes alone are for the
kernels of ../decode_layers.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build

from .tiles import plan_tiles

if TYPE_CHECKING:
    from . import PagedBatch

unavailable_reason = build.unavailable_reason
_TILE_ROWS = 128  # of the kernel: tokens times query heads a kv head


def paged_attention(
    q: jax.Array, cache: jax.Array, batch: "PagedBatch", *, layer: int | jax.Array, scale: float
) -> jax.Array:
    """See `PagedAttention`. Head dim 64 or 128, up to 8 query heads a kv head, pages of a multiple of 16 tokens.

    Raises:
      TypeError: the layer is no Python number: it is compiled in.
    """
    if isinstance(layer, jax.Array):
        raise TypeError("layer is an array; the CUDA kernels need a Python number (unroll the layers)")
    build.load()
    counter = jax.ShapeDtypeStruct((1,), jnp.int32)
    attended, _ = jax.ffi.ffi_call("meshserve_prefill_attention", (jax.ShapeDtypeStruct(q.shape, q.dtype), counter))(
        q,
        cache,
        plan_tiles(batch, tile_tokens=_TILE_ROWS // q.shape[2]),
        batch.page_table,
        batch.positions,
        layer=np.int32(layer),
        scale=np.float32(scale),
    )
    return attended
