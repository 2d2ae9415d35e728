"""What lies between the QKV projection and attention on an NVIDIA GPU: see ../cuda/attention/qk_norm_rope.cuh."""

import jax
import numpy as np

from meshserve.kernels.cuda import build, operands

from .contract import PagedBatch, RopeSettings
from .cuda_shapes import check


def qk_norm_rope(
    rows: jax.Array, cache: jax.Array, batch: PagedBatch, settings: RopeSettings, *, layer: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `QKNormRope`. Supports the same shapes and raises the same errors as attention does."""
    num_tokens, kv_heads, head_dim = rows.shape[0], cache.shape[2], cache.shape[5]
    group = rows.shape[1] // (kv_heads * head_dim) - 2
    check("cuda", group, rows.dtype, cache, layer)
    build.load(build.present())
    results = (
        jax.ShapeDtypeStruct((num_tokens, kv_heads, group, head_dim), rows.dtype),
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
    )
    q, cache = jax.ffi.ffi_call("meshserve_qk_norm_rope", results, input_output_aliases={5: 1})(
        rows,
        settings.q_norm,
        settings.k_norm,
        settings.cos,
        settings.sin,
        cache,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        operands.beside_tokens(batch.token_request),
        layer=np.int32(layer),
        epsilon=np.float32(settings.epsilon),
    )
    return q, cache
