"""Paged attention on an NVIDIA Hopper GPU, in bfloat16: every token is its own row of the decode kernel in ../cuda.

Made for decode steps. A prefill chunk comes out right, but reads its pages once a token.
"""

from typing import TYPE_CHECKING

import jax
import numpy as np

from meshserve.kernels.cuda import build

if TYPE_CHECKING:
    from . import PagedBatch

unavailable_reason = build.unavailable_reason


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
    return jax.ffi.ffi_call("meshserve_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q,
        cache,
        batch.page_table[batch.token_request],
        batch.positions,
        layer=np.int32(layer),
        scale=np.float32(scale),
        tuning=np.zeros(7, np.int32),
    )
