"""Paged attention on NVIDIA GPUs since Ampere, in bfloat16: see ../cuda/attention/sm80.

The cache may hold 8-bit floats (e4m3), which are converted in registers.

One call handles prefill chunks and decodes. Steps with few tokens for each request are computed in tiles of 16 rows,
others in tiles of 128. As in `sm90`, long contexts are split into parts.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, operands, support

from .contract import AttentionImplementation, PagedBatch, least_cost
from .cuda_shapes import MAX_GROUP, check, unsupported_shapes
from .qk_norm_rope import qk_norm_rope
from .reference import write_kv
from .tiles import split_work

_FEW_ROWS, _MANY_ROWS = 16, 128  # of a tile: tokens times query heads per kv head
_BLOCKS_EACH = 2  # thread blocks that a multiprocessor runs at the same time
_TILE_KEYS = 0  # keys of a block in tiles of 128 rows, 32 or 64; 0: as the device has shared memory for
NAME = "portable"


def paged_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
) -> jax.Array:
    """See `PagedAttention`. Supports the same shapes and raises the same errors as `sm90.paged_attention`."""
    return _attend(q, cache, batch, layer, scale, has_sums=False)[0]


def partial_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `PartialAttention`. Supports the same shapes and raises the same errors as `sm90.partial_attention`."""
    num_calls = -(-q.shape[2] // MAX_GROUP)
    if q.shape[2] % num_calls:
        raise ValueError(f"attention {NAME!r}: {q.shape[2]} query heads per kv head are no equal groups of up to 8.")
    results = [_attend(part, cache, batch, layer, scale, has_sums=True) for part in jnp.split(q, num_calls, axis=2)]
    attended, sums = zip(*results, strict=True)
    return jnp.concatenate(attended, axis=2), jnp.concatenate(sums, axis=2)


def tile_rows(num_tokens: int, num_requests: int, group: int) -> int:
    """Returns the rows of the tiles in which a step is computed."""
    return _FEW_ROWS if num_tokens <= num_requests * (_FEW_ROWS // group) else _MANY_ROWS


def _attend(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, layer: int | jax.Array, scale: float, *, has_sums: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the result of `PartialAttention`, whose second array is unspecified without `has_sums`."""
    check(NAME, q.shape[2], q.dtype, cache, layer)
    build.load(build.PORTABLE)
    rows = tile_rows(q.shape[0], batch.page_table.shape[0], q.shape[2])
    parts, scratch = split_work(
        batch,
        heads=q.shape[1:],
        page_size=cache.shape[4],
        tile_rows=rows,
        num_blocks=_BLOCKS_EACH * support.num_multiprocessors(),
    )
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        *scratch,
        jax.ShapeDtypeStruct(q.shape[:3] if has_sums else (1,), jnp.float32),
    )
    attended, _, _, sums = jax.ffi.ffi_call("meshserve_tile_attention", results)(
        q,
        cache,
        parts,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        layer=np.int32(layer),
        scale=np.float32(scale),
        tile_rows=np.int32(rows),
        tile_keys=np.int32(_TILE_KEYS),
    )
    return attended, sums


IMPLEMENTATION = AttentionImplementation(
    name=NAME,
    unsupported_device=support.no_ampere,
    unsupported_shapes=unsupported_shapes,
    unavailable_reason=partial(build.unbuildable_reason, build.PORTABLE),
    automatic_on=("gpu",),
    attend=paged_attention,
    attend_part=partial_attention,
    write=write_kv,
    prepare=qk_norm_rope,
    cost=least_cost,
    measured_on=("h200",),
    reached=0.35,  # a prompt of 8,192 tokens (docs/log/prefill.md)
)
