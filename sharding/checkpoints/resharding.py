"""Moves arrays from one mesh to another, device to device, without the disk or host memory.

A new parameter is described by `Piece`s of the old one, just as loading describes it by pieces of stored tensors. Each
device of the new mesh receives the rectangles it needs from the devices that hold them, and assembles them itself.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .parameters import Piece, Region, bounds, overlap

_Shards = Sequence[tuple[Region, jax.Array]]


def reshard(old: jax.Array, pieces: Sequence[Piece], shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Assembles a new array from pieces of an old one. Elements that no piece covers are zero.

    Args:
      old: a fully addressable array. It stays unchanged, so a device in both meshes holds parts of both arrays.
      pieces: rectangles of the old array, of the same rank as the new one. Their tensor name is ignored.
      shape: global shape of the new array.
      sharding: sharding of the new array.
    """
    shards = list(_distinct_shards(old))
    blocks = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        blocks.append(_block(shards, pieces, bounds(index, shape), old.dtype, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


def _block(shards: _Shards, pieces: Sequence[Piece], block: Region, dtype: jnp.dtype, device: jax.Device) -> jax.Array:
    """Assembles one device's block of the new array on that device."""
    extent = _extent(block)
    result: jax.Array | None = None
    for piece in pieces:
        if (regions := overlap(piece, block)) is None:
            continue
        source, target = regions
        for region, shard in shards:
            part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(source, region, strict=True))
            if any(first >= last for first, last in part):
                continue
            values = jax.device_put(_cut(shard, _starts(part, region), _extent(part)), device)
            if _extent(part) == extent:
                return values
            if result is None:
                result = jnp.zeros(extent, dtype, device=device)
            place = zip(_starts(target, block), _starts(part, source), strict=True)
            result = _paste(result, values, tuple(start + offset for start, offset in place))
    return result if result is not None else jnp.zeros(extent, dtype, device=device)


def _distinct_shards(array: jax.Array) -> Iterator[tuple[Region, jax.Array]]:
    """Yields each distinct block of the array once, even if it is replicated."""
    seen = set()
    for shard in array.addressable_shards:
        region = bounds(shard.index, array.shape)
        if region not in seen:
            seen.add(region)
            yield region, shard.data


def _extent(region: Region) -> tuple[int, ...]:
    return tuple(last - first for first, last in region)


def _starts(region: Region, outer: Region) -> tuple[int, ...]:
    return tuple(first - start for (first, _), (start, _) in zip(region, outer, strict=True))


# The start indices are arguments rather than constants, so that a few programs serve all layers and devices.


@partial(jax.jit, static_argnums=2)
def _cut(values: jax.Array, starts: tuple[jax.Array, ...], extent: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(values, starts, extent)


@partial(jax.jit, donate_argnums=0)
def _paste(values: jax.Array, part: jax.Array, starts: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(values, part, starts)
