"""Maps parameters to arrays of an Orbax checkpoint of meshserve, and to the same parameters in another layout.

The checkpoint stores what a single device would hold, layer by layer: fused projections as in `ShardLayout.qkv_rows`,
vocabulary and MLP without padding. The format is therefore independent of the mesh, and every shard consists of
rectangles of it. KV heads are repeated, query heads split and dimensions padded when they are read.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout, moved_qkv_rows, shard_layout
from meshserve.sharding.mesh import RULES

from ..api.model_config import ModelConfig
from .registry import abstract_model, architecture_of
from .weight_map import FusedQKV

Pieces = Callable[[int], list[Piece]]  # pieces of a parameter per layer; unstacked parameters have only layer 0
STACK = "layers."  # name prefix of parameters that are stacked over layers


class StoredArray(NamedTuple):
    """An array of the checkpoint."""

    shape: tuple[int, ...]
    sharded_axis: int | None  # axis that is sharded for serving, if any


def model_layout(config: ModelConfig, num_shards: int) -> ShardLayout:
    """Returns the layout of a model on a mesh of `num_shards` devices.

    Raises:
      ValueError: `num_shards` does not divide the number of query heads.
    """
    return shard_layout(
        num_shards=num_shards,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        mlp_dim=config.mlp_dim,
    )


def table_arrays(config: ModelConfig) -> dict[str, StoredArray]:
    """Returns the parameters outside the layers."""
    return {name: array for name, array in _arrays(config).items() if not name.startswith(STACK)}


def layer_arrays(config: ModelConfig) -> dict[str, StoredArray]:
    """Returns the parameters of one layer."""
    arrays = _arrays(config).items()
    return {name.removeprefix(STACK): array for name, array in arrays if name.startswith(STACK)}


@functools.lru_cache(maxsize=8)
def _arrays(config: ModelConfig) -> dict[str, StoredArray]:
    """Returns each parameter by path as a single device holds it; for stacked parameters, one layer."""
    _, abstract = abstract_model(config, model_layout(config, 1), jnp.dtype("float32"))
    arrays = {}
    for path, weight in nnx.to_flat_state(abstract):
        name = ".".join(map(str, path))
        num_stacked = 1 if name.startswith(STACK) else 0
        sharded = [index for index, axis in enumerate(weight.axes[num_stacked:]) if axis in RULES]
        arrays[name] = StoredArray(weight.shape[num_stacked:], sharded[0] if sharded else None)
    return arrays


def stored_parts(config: ModelConfig) -> dict[str, dict[str, StoredArray]]:
    """Returns the arrays of each part of a checkpoint."""
    layer = layer_arrays(config)
    tables = {name: {name: array} for name, array in table_arrays(config).items()}
    return tables | {part_of_layer(index): layer for index in range(config.num_layers)}


def part_of_layer(layer: int) -> str:
    """Returns the name of a layer's part."""
    return f"{STACK}{layer:04d}"


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every array of the checkpoint."""
    return {
        stored_name(part, key): array.shape
        for part, arrays in stored_parts(config).items()
        for key, array in arrays.items()
    }


def stored_name(part: str, key: str) -> str:
    """Returns the name of an array in a part."""
    return part if key == part else f"{part}.{key}"


def moved_pieces(config: ModelConfig, old: ShardLayout, new: ShardLayout) -> dict[str, list[Piece]]:
    """Returns the pieces that convert each parameter from one layout to another; for stacked parameters, of one layer.

    The pieces refer to the same parameter in the old layout and have no tensor name. Regions without a piece are
    padding.
    """
    weight_map = architecture_of(config).weight_map
    fused = {STACK + key for key, tensors in weight_map.layers.items() if isinstance(tensors, FusedQKV)}
    moves = moved_qkv_rows(old, new, config.head_dim)

    def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
        if name in fused:
            return [
                Piece("", (move.old_group, move.old_row, 0), (1, move.num_rows, shape[-1]), (move.group, move.row, 0))
                for move in moves
            ]
        zeros = (0,) * len(shape)
        return [Piece("", zeros, shape, zeros)]

    return {name: pieces(name, array.shape) for name, array in _arrays(config).items()}


def stored_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter of the model, keyed by path. Stacked parameters have pieces per layer."""

    def named(name: str, pieces: list[Piece]) -> Pieces:
        key = name.removeprefix(STACK)

        def of_layer(layer: int) -> list[Piece]:
            tensor = name if key == name else stored_name(part_of_layer(layer), key)
            return [dataclasses.replace(piece, tensor=tensor) for piece in pieces]

        return of_layer

    moved = moved_pieces(config, model_layout(config, 1), layout)
    return {name: named(name, pieces) for name, pieces in moved.items()}


def num_weight_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Returns the bytes of the model without sharding and padding."""
    return sum(math.prod(shape) for shape in stored_shapes(config).values()) * dtype.itemsize
