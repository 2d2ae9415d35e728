"""Paged attention on a TPU: a single Pallas kernel for the decodes and prefill chunks of a step.

The kernel has no grid. It iterates over the step's tokens itself, using positions and requests in scalar memory, in two
parts:

1. Decodes: the leading tokens that are the only token of their request. The work is a list of items (token, block of up
   to `Tiling.block_pages` pages). Each iteration processes `Tiling.items` of them, regardless of request, so that their
   chains of matmul, maximum, exponential and matmul overlap in the schedule. All maxima of an iteration are computed
   before the first exponential, so that the online softmax costs one multiply-add per item.
2. Chunks: runs of consecutive tokens of one request, in tiles of `Tiling.tile_tokens`, with flash attention in VMEM.

Pages are copied from HBM one by one, `Tiling.slots - 1` iterations ahead. No page beyond a request's last token is
copied. Every copy has a static size (a run of n rows is split into powers of two), so that the interpreter can run it.

The cache may hold 8-bit floats, which are converted to the dtype of q after the copy.
"""

import math
from functools import partial
from typing import Any, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshserve.kernels.implementation import no_tpu

from . import tpu_write
from .contract import AttentionImplementation, AttentionShapes, PagedBatch, least_cost
from .tpu_body import Kernel, Ref, Scratch, Tiling

_LANES = 128  # multiple at which copies can address the last dimension of an array
_VMEM_BYTES = 48 << 20  # scratch and what the compiler adds; the chip with the least VMEM (TPU7x) has 64 MiB


def default_tiling(*, num_tokens: int, kv_heads: int, group: int, page_size: int) -> Tiling:
    """Returns a tiling with 8 chains of 512 positions per iteration.

    These are 2 MiB of bfloat16 pages, which a v6e reads in about 1.3 us.
    """
    block_pages = max(1, 512 // page_size)
    items = max(1, 8 // kv_heads)
    tile_tokens = _power_below(max(8, 512 // group))
    return Tiling(
        items=items,
        block_pages=block_pages,
        slots=3,
        tile_tokens=min(tile_tokens, 128, 1 << (num_tokens - 1).bit_length()),
        tile_pages=block_pages,
    )


class Options(TypedDict, total=False):
    """Keyword arguments of `paged_attention` and `partial_attention`."""

    layer: Required[int | jax.Array]
    scale: Required[float]
    tiling: Tiling | None  # None selects `default_tiling`
    interpret: Any  # passed to `pallas_call`


def paged_attention(q: jax.Array, cache: jax.Array, batch: PagedBatch, **options: Unpack[Options]) -> jax.Array:
    """See `PagedAttention`.

    Raises:
      ValueError: the page size or head dim does not fit the chip's tiles.
    """
    return _attend(q, cache, batch, has_sums=False, **options)[0]


def partial_attention(
    q: jax.Array, cache: jax.Array, batch: PagedBatch, **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]:
    """See `PartialAttention`; otherwise as `paged_attention`."""
    attended, sums = _attend(q, cache, batch, has_sums=True, **options)
    return attended, sums[..., 0]


def _attend(
    q: jax.Array,
    cache: jax.Array,
    batch: PagedBatch,
    *,
    layer: int | jax.Array,
    scale: float,
    has_sums: bool,
    tiling: Tiling | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Returns the attention and, with `has_sums`, the sums of `PartialAttention`, repeated [T, K, G, _LANES]."""
    num_tokens, kv_heads, group, _ = q.shape
    page_size = cache.shape[4]
    if not interpret:
        check_shapes(head_dim=q.shape[3], page_size=page_size, dtype=cache.dtype)
    tiling = tiling or default_tiling(num_tokens=num_tokens, kv_heads=kv_heads, group=group, page_size=page_size)
    num_requests, max_pages = batch.page_table.shape
    call_requests = max(1, min(num_requests, tiling.table_bytes // (4 * max_pages)))
    is_token = batch.positions >= 0
    positions, token_request = batch.positions.astype(jnp.int32), batch.token_request.astype(jnp.int32)
    indices = jnp.arange(1, num_tokens + 1, dtype=jnp.int32)
    num_calls = -(-num_requests // call_requests)
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if has_sums:
        shapes.append(jax.ShapeDtypeStruct((*q.shape[:3], _LANES), jnp.float32))
    out = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes) if num_calls > 1 else ()
    start_token = jnp.int32(0)
    for first in range(0, num_requests, call_requests):
        rows = batch.page_table[first : first + call_requests]
        stop = first + rows.shape[0]
        stop_token = jnp.max(jnp.where(is_token & (token_request < stop), indices, start_token))
        scalars = jnp.stack([jnp.asarray(layer, jnp.int32), start_token, stop_token])
        out = _call(
            scalars, positions, token_request - first, rows.reshape(-1).astype(jnp.int32), q, cache, out, shapes,
            scale=scale, max_pages=max_pages, max_decodes=min(num_tokens, rows.shape[0]), tiling=tiling,
            interpret=interpret,
        )  # fmt: skip
        start_token = stop_token
    return (jnp.where(is_token[:, None, None, None], out[0], 0), *out[1:])


def check_shapes(*, head_dim: int, page_size: int, dtype: jnp.dtype) -> None:
    """Checks that Mosaic can tile pages of this shape.

    Raises:
      ValueError: it cannot; the message says what is supported.
    """
    if reason := _untileable(head_dim=head_dim, page_size=page_size, dtype=dtype):
        raise ValueError(f"{reason}.")


def _untileable(*, head_dim: int, page_size: int, dtype: jnp.dtype) -> str | None:
    """Returns why Mosaic cannot tile pages of this shape, or None if it can."""
    rows = 32 // jnp.dtype(dtype).itemsize  # rows of a hardware tile
    if head_dim not in (64, 128):
        return f"head_dim is {head_dim}; the TPU kernel supports 64 and 128"
    if page_size % rows or page_size > 256:
        return f"page_size is {page_size}; the TPU kernel supports multiples of {rows} up to 256 in {jnp.dtype(dtype)}"
    return None


def _call(  # noqa: PLR0913  operands of the kernel, and the shapes of its results
    scalars: jax.Array,
    positions: jax.Array,
    token_request: jax.Array,
    table: jax.Array,
    q: jax.Array,
    cache: jax.Array,
    out: tuple[jax.Array, ...],
    shapes: list[jax.ShapeDtypeStruct],
    *,
    interpret: Any,
    **static: Any,
) -> tuple[jax.Array, ...]:
    """Calls the kernel for tokens scalars[1] to scalars[2] (exclusive) of q.

    The results have `shapes`. All other rows of `out`, if it is not empty, stay unchanged.
    """
    page = cache.shape[2:]  # [K, 2, S, H]
    has_sums = len(shapes) > 1
    scratch = _scratch(q, cache, static["tiling"], static["max_decodes"], has_sums=has_sums)
    prefetched = (scalars, positions, token_request, table)
    operands = (q, cache, *out)

    def body(*refs: Ref) -> None:
        num_inputs = len(prefetched) + len(operands)
        results, rest = refs[num_inputs : num_inputs + len(shapes)], refs[num_inputs + len(shapes) :]
        inputs = dict(zip(("scalars", "positions", "token_request", "table", "q", "cache"), refs, strict=False))
        Kernel(
            **inputs,
            out=results[0],
            sums=results[1] if has_sums else None,
            scratch=Scratch(**dict(zip(scratch, rest, strict=True))),
            **static,
        ).run()

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(shapes),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=shapes,
        input_output_aliases={len(prefetched) + 2 + index: index for index in range(len(out))},
        # Bounds checks would lengthen an iteration of the decode loop from 1626 to 2130 bundles (v6e). The page numbers
        # come from the page allocator, and the tests check them with the interpreter.
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES, disable_bounds_checks=True),
        cost_estimate=_cost(q, math.prod(page) * cache.dtype.itemsize, table.shape[0] // 2),
        name="paged_attention",
        interpret=interpret,
    )(*prefetched, *operands)


def _scratch(q: jax.Array, cache: jax.Array, tiling: Tiling, max_decodes: int, *, has_sums: bool) -> dict[str, Any]:
    """Returns the kernel's buffers in VMEM and its semaphores, by their names in `Scratch`."""
    _, *heads = q.shape  # [K, G, H]
    kv_heads, group, head_dim = heads
    page = cache.shape[2:]  # [K, 2, S, H]
    tile_rows = tiling.tile_tokens * group
    scratch = dict(
        decode_q=pltpu.VMEM((max_decodes, *heads), q.dtype),
        decode_out=pltpu.VMEM((max_decodes + 1, *heads), q.dtype),  # the last row receives the results of unused items
        decode_pages=pltpu.VMEM((tiling.slots, tiling.items * tiling.block_pages, *page), cache.dtype),
        decode_max=pltpu.VMEM((kv_heads, group, 1), jnp.float32),
        decode_sum=pltpu.VMEM((kv_heads, group, 1), jnp.float32),
        decode_acc=pltpu.VMEM(tuple(heads), jnp.float32),
        tile_q=pltpu.VMEM((2, tiling.tile_tokens, *heads), q.dtype),
        tile_out=pltpu.VMEM((tiling.tile_tokens, *heads), q.dtype),
        tile_rows=pltpu.VMEM((kv_heads, tile_rows, head_dim), q.dtype),
        tile_pages=pltpu.VMEM((2, tiling.tile_pages, *page), cache.dtype),
        tile_max=pltpu.VMEM((kv_heads, tile_rows, 1), jnp.float32),
        tile_sum=pltpu.VMEM((kv_heads, tile_rows, 1), jnp.float32),
        tile_acc=pltpu.VMEM((kv_heads, tile_rows, head_dim), jnp.float32),
        decode_sems=pltpu.SemaphoreType.DMA((tiling.slots,)),
        tile_sems=pltpu.SemaphoreType.DMA((2,)),
        q_sems=pltpu.SemaphoreType.DMA((2,)),
        out_sem=pltpu.SemaphoreType.DMA(()),
    )
    if has_sums:
        scratch["decode_sums"] = pltpu.VMEM((max_decodes + 1, kv_heads, group, _LANES), jnp.float32)
        scratch["tile_sums"] = pltpu.VMEM((tiling.tile_tokens, kv_heads, group, _LANES), jnp.float32)
    return scratch


def _cost(q: jax.Array, page_bytes: int, num_pages: int) -> pl.CostEstimate:
    """Returns the cost estimate for XLA's scheduler, which assumes requests half as long as the page table allows."""
    read = num_pages * page_bytes
    return pl.CostEstimate(flops=2 * read * q.shape[2], bytes_accessed=read + 2 * q.nbytes, transcendentals=read // 64)


def _power_below(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _unsupported_shapes(shapes: AttentionShapes) -> str | None:
    return _untileable(head_dim=shapes.head_dim, page_size=shapes.page_size, dtype=shapes.cache_dtype)


IMPLEMENTATION = AttentionImplementation(
    name="tpu",
    unsupported_device=no_tpu,
    unsupported_shapes=_unsupported_shapes,
    automatic_on=("tpu",),
    attend=paged_attention,
    attend_part=partial_attention,
    write=tpu_write.write_kv,
    cost=least_cost,
)

_INTERPRET = pltpu.InterpretParams()
INTERPRETED = AttentionImplementation(
    name="tpu_interpreted",
    attend=partial(paged_attention, interpret=_INTERPRET),
    attend_part=partial(partial_attention, interpret=_INTERPRET),
    write=partial(tpu_write.write_kv, interpret=_INTERPRET),
    cost=least_cost,
)
