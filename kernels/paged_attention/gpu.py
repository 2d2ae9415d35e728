"""Paged attention on an NVIDIA Hopper GPU, in bfloat16: see ../cuda/prefill.cuh and qk_norm_rope.cuh.

The cache may hold 8-bit floats (e4m3), which are converted in shared memory.

One call handles prefill chunks and decodes. Besides the result, it needs a table of the work and at most 12 MB (176
tiles of 128 rows, in float32) for the partial results of long contexts, whose keys are split into parts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, operands

from .storage import FP8
from .tiles import count_shares, most_slots, plan_parts

if TYPE_CHECKING:
    from . import PagedBatch, RopeSettings

unavailable_reason = build.unavailable_reason
_MAX_GROUP = 8  # query heads per kv head in one call
_TILE_ROWS = 128  # rows of a kernel tile: tokens times query heads per kv head


def paged_attention(
    q: jax.Array, cache: jax.Array, batch: "PagedBatch", *, layer: int | jax.Array, scale: float
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
    q: jax.Array, cache: jax.Array, batch: "PagedBatch", *, layer: int | jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `PartialAttention`. Supports the same shapes and raises the same errors as `paged_attention`, but more heads.

    More than 8 query heads per kv head are computed in several calls, each of which reads the keys and values.
    """
    num_calls = -(-q.shape[2] // _MAX_GROUP)
    if q.shape[2] % num_calls:
        raise ValueError(f"attention 'cuda': {q.shape[2]} query heads per kv head are no equal groups of up to 8.")
    results = [_attend(part, cache, batch, layer, scale, has_sums=True) for part in jnp.split(q, num_calls, axis=2)]
    attended, sums = zip(*results, strict=True)
    return jnp.concatenate(attended, axis=2), jnp.concatenate(sums, axis=2)


def _attend(
    q: jax.Array, cache: jax.Array, batch: "PagedBatch", layer: int | jax.Array, scale: float, *, has_sums: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the result of `PartialAttention`, whose second array is unspecified without `has_sums`."""
    _check(q.shape[2], q.dtype, cache, layer)
    build.load()
    parts, scratch = split_work(batch, heads=q.shape[1:], page_size=cache.shape[4])
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


def split_work(
    batch: "PagedBatch", *, heads: Sequence[int], page_size: int
) -> tuple[jax.Array, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Returns the table of a step's work, and the shapes of the memory for partial results and counters.

    Args:
      batch: The tokens of the step.
      heads: KV heads, query heads per KV head, head dim.
      page_size: Tokens of a page.
    """
    (kv_heads, group, head_dim), num_tokens = heads, batch.positions.shape[0]
    tile_tokens = _TILE_ROWS // group
    num_shares = count_shares(kv_heads=kv_heads, max_keys=batch.page_table.shape[1] * page_size)
    num_slots = most_slots(num_shares)
    unmerged = (num_slots, kv_heads, min(num_tokens, tile_tokens) * group, head_dim + 4)
    num_counters = max(1 + num_slots * kv_heads * 2, 2 * num_tokens)  # see `operands` for the second size
    scratch = jax.ShapeDtypeStruct(unmerged, jnp.float32), jax.ShapeDtypeStruct((num_counters,), jnp.int32)
    return plan_parts(batch, tile_tokens=tile_tokens, num_shares=num_shares), scratch


def qk_norm_rope(
    rows: jax.Array, cache: jax.Array, batch: "PagedBatch", settings: "RopeSettings", *, layer: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `QKNormRope`. Supports the same shapes and raises the same errors as `paged_attention`."""
    num_tokens, kv_heads, head_dim = rows.shape[0], cache.shape[2], cache.shape[5]
    group = rows.shape[1] // (kv_heads * head_dim) - 2
    _check(group, rows.dtype, cache, layer)
    build.load()
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


def _check(group: int, dtype: jnp.dtype, cache: jax.Array, layer: int | jax.Array) -> None:
    """Checks shapes and dtypes, which the kernels themselves do not check."""
    if isinstance(layer, jax.Array):
        raise TypeError("layer is an array; the CUDA kernels need a Python number: unroll the layers")
    reason = unsupported_reason(group, dtype, cache)
    if reason is not None:
        raise ValueError(f"attention 'cuda': {reason}. Use 'reference'.")


def unsupported_reason(group: int, dtype: jnp.dtype, cache: jax.Array) -> str | None:
    """Returns why the kernels do not support these shapes or dtypes, or None if they do. No array is read."""
    page_size, head_dim = cache.shape[4:]
    checks = (
        (head_dim in (64, 128), f"head_dim is {head_dim}; 64 and 128 are supported"),
        (1 <= group <= _MAX_GROUP, f"there are {group} query heads per kv head; 1 to 8 are supported"),
        (page_size % 16 == 0, f"page_size is {page_size}; a multiple of 16 is needed"),
        (dtype == jnp.bfloat16, f"heads are {dtype}; bfloat16 is needed"),
        (cache.dtype in (jnp.bfloat16, FP8), f"the cache is {cache.dtype}; bfloat16 or {FP8} is needed"),
    )
    return next((reason for holds, reason in checks if not holds), None)
