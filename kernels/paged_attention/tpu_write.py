"""Writes a step's keys and values into the cache on a TPU, in place, as one Pallas kernel.

A copy between HBM and VMEM moves whole tiles of 16 bfloat16 rows. The kernel therefore reads the tile around a new
row, inserts the row, and writes the tile back. Neighboring tokens of a request share a tile and are combined: a chunk
of 512 tokens reads and writes at most 33 tiles, not 512.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .contract import PagedBatch
from .storage import to_cache

Ref = Any  # a Pallas reference, whose type has no public name

_BLOCK_BYTES = 1 << 20  # size of the tiles in VMEM at a time, without padding


def write_kv(
    cache: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, interpret: Any = False
) -> jax.Array:
    """See `WriteKV`. `interpret` is passed to `pallas_call`."""
    page_size = cache.shape[4]
    tile_rows = min(32 // cache.dtype.itemsize, page_size)
    positions = jnp.maximum(batch.positions, 0)
    page = batch.page_table[batch.token_request, positions // page_size]
    # The index of each token's tile, equal for tokens that share one; -1 for padding.
    tile = page * (page_size // tile_rows) + positions % page_size // tile_rows
    tile = jnp.where(batch.positions < 0, -1, tile).astype(jnp.int32)
    fresh = to_cache(jnp.stack([k, v], axis=2), cache.dtype)  # [T, K, 2, H]
    num_tokens, kv_heads, _, head_dim = fresh.shape
    tile_bytes = 2 * kv_heads * tile_rows * head_dim * cache.dtype.itemsize
    block_tokens = min(num_tokens, max(8, 1 << (max(_BLOCK_BYTES // tile_bytes, 1).bit_length() - 1)))
    scalars = (jnp.asarray(layer, jnp.int32)[None], tile, (positions % tile_rows).astype(jnp.int32))
    return pl.pallas_call(
        partial(_write, num_tokens=num_tokens, tiles_per_page=page_size // tile_rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(num_tokens, block_tokens),),
            in_specs=[
                pl.BlockSpec((block_tokens, kv_heads, 2, head_dim), lambda block, *_: (block, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((block_tokens, kv_heads, 2, tile_rows, head_dim), cache.dtype),
                pltpu.SMEM((block_tokens,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * num_tokens * tile_bytes),
        name="write_kv",
        interpret=interpret,
    )(*scalars, fresh, cache)


def _write(  # noqa: PLR0913  references that Pallas passes
    layer: Ref,  # [1]
    tile: Ref,  # [T]
    row: Ref,  # [T]: row of the token in its tile
    fresh: Ref,  # [block, K, 2, H]
    _cache: Ref,  # the input alias of the next argument
    cache: Ref,  # [L, P, K, 2, S, H] in HBM
    tiles: Ref,  # [block, K, 2, rows, H]
    place: Ref,  # [block]: index of the token's tile in `tiles`
    sems: Ref,
    *,
    num_tokens: int,
    tiles_per_page: int,
) -> None:
    block_tokens, tile_rows = tiles.shape[0], tiles.shape[3]
    first = pl.program_id(0) * block_tokens
    count = jnp.minimum(block_tokens, num_tokens - first)

    def in_cache(token: jax.Array) -> Ref:
        page, part = tile[token] // tiles_per_page, tile[token] % tiles_per_page
        return cache.at[layer[0], page, :, :, pl.ds(pl.multiple_of(part * tile_rows, tile_rows), tile_rows)]

    def is_new(token: jax.Array) -> jax.Array:
        """Returns whether the token's tile differs from that of the token before it in this block."""
        before = tile[jnp.maximum(token - 1, 0)]
        return (tile[token] >= 0) & ((token == first) | (tile[token] != before))

    def read(index: jax.Array, num_tiles: jax.Array) -> jax.Array:
        token = first + index
        num_tiles = jnp.where(is_new(token), num_tiles + 1, num_tiles)
        place[index] = num_tiles - 1

        @pl.when(is_new(token))
        def _start() -> None:
            pltpu.make_async_copy(in_cache(token), tiles.at[num_tiles - 1], sems.at[0]).start()

        return num_tiles

    def insert(index: jax.Array, _: None) -> None:
        token = first + index

        @pl.when(tile[token] >= 0)
        def _put() -> None:
            old = tiles[place[index]]
            is_row = jax.lax.broadcasted_iota(jnp.int32, old.shape, 2) == row[token]
            tiles[place[index]] = jnp.where(is_row, fresh[index][:, :, None, :], old)

    def write(index: jax.Array, _: None) -> None:
        token = first + index

        @pl.when(is_new(token))
        def _start() -> None:
            pltpu.make_async_copy(tiles.at[place[index]], in_cache(token), sems.at[1]).start()

    def wait(sem: Ref) -> None:
        copy = pltpu.make_async_copy(tiles.at[0], cache.at[0, 0, :, :, pl.ds(0, tile_rows)], sem)
        jax.lax.fori_loop(0, num_tiles, lambda *_: copy.wait(), None)

    num_tiles = jax.lax.fori_loop(0, count, read, jnp.int32(0))
    wait(sems.at[0])
    jax.lax.fori_loop(0, count, insert, None)
    jax.lax.fori_loop(0, count, write, None)
    wait(sems.at[1])  # before the next block reads, because it may begin in a tile of this block
