"""Paged attention on an NVIDIA Hopper GPU, in bfloat16: see ../cuda/attention.

The cache may hold 8-bit floats (e4m3), which are converted in shared memory.

One call handles prefill chunks and decodes. Besides the result, it needs a table of the work and at most 12 MB (176
tiles of 128 rows, in float32) for the partial results of long contexts, whose keys are split into parts.
"""

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, operands, support

from .contract import AttentionImplementation, PagedBatch, least_cost
from .cuda_shapes import MAX_GROUP, check, unsupported_shapes
from .qk_norm_rope import qk_norm_rope
from .reference import write_kv
from .tiles import split_work

TILE_ROWS = 128  # rows of a kernel tile: tokens times query heads per kv head


def paged_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
) -> jax.Array:
    """See `PagedAttention`.

    Supports head dim 64 or 128, up to 8 query heads per kv head, and a page size that is a multiple of 16 tokens.

    Raises:
      TypeError: `layer` is not a Python number; it is a compile-time constant.
      ValueError: a shape or dtype is not supported.
      KernelBuildError: the kernels cannot be compiled or loaded.
    """
    return _attend(q, cache, batch, layer, scale, has_sums=False)[0]


def partial_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `PartialAttention`. Supports the same shapes and raises the same errors as `paged_attention`, but more heads.

    More than 8 query heads per kv head are computed in several calls, each of which reads the keys and values.
    """
    num_calls = -(-q.shape[2] // MAX_GROUP)
    if q.shape[2] % num_calls:
        raise ValueError(f"attention 'cuda': {q.shape[2]} query heads per kv head are no equal groups of up to 8.")
    results = [_attend(part, cache, batch, layer, scale, has_sums=True) for part in jnp.split(q, num_calls, axis=2)]
    attended, sums = zip(*results, strict=True)
    return jnp.concatenate(attended, axis=2), jnp.concatenate(sums, axis=2)


def _attend(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, layer: int | jax.Array, scale: float, *, has_sums: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the result of `PartialAttention`, whose second array is unspecified without `has_sums`."""
    check("cuda", q.shape[2], q.dtype, cache, layer)
    build.load()
    parts, scratch = split_work(batch, heads=q.shape[1:], page_size=cache.shape[4], tile_rows=TILE_ROWS)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        *scratch,
        jax.ShapeDtypeStruct(q.shape[:3] if has_sums else (1,), jnp.float32),
    )
    attended, _, _, sums = jax.ffi.ffi_call("meshserve_prefill_attention", results)(
        q,
        cache,
        parts,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        layer=np.int32(layer),
        scale=np.float32(scale),
    )
    return attended, sums


IMPLEMENTATION = AttentionImplementation(
    name="cuda",
    unsupported_device=support.no_hopper,
    unsupported_shapes=unsupported_shapes,
    unavailable_reason=build.unbuildable_reason,
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    reached=0.48,  # prompts of up to 131,000 tokens (docs/plan.md)
    attend=paged_attention,
    attend_part=partial_attention,
    write=write_kv,
    prepare=qk_norm_rope,
    cost=least_cost,
)
