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
from meshserve.sharding.expert_layout import ExpertLayout
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.mesh import RULES

from ..api.model_config import ModelConfig
from .registry import abstract_model, architecture_of
from .weight_map import StoredParameter, Tensors

Pieces = Callable[[int], list[Piece]]  # pieces of a parameter per layer of its stack; unstacked ones have only layer 0


class Stack(NamedTuple):
    """The place of a parameter that is stacked over layers."""

    key: str  # name of the parameter in a layer
    layers: tuple[int, ...]  # of the model, in the order of the stack


class StoredArray(NamedTuple):
    """An array of the checkpoint."""

    shape: tuple[int, ...]
    sharded_axis: int | None  # axis that is sharded for serving, if any
    parameter: str  # path of the model's parameter that it belongs to
    stack_index: int = 0  # in the parameter's stack


def stack_of(config: ModelConfig, name: str) -> Stack | None:
    """Returns the stack that a parameter, given by its path, belongs to; None if it is not stacked."""
    stack, _, key = name.partition(".")
    return Stack(key, config.stacks[stack]) if key and stack in config.stacks else None


def model_layout(config: ModelConfig, num_shards: int, *, expert_parallel: bool = False) -> ShardLayout:
    """Returns the layout of a model on a mesh of `num_shards` devices.

    Args:
      config: The model.
      num_shards: Number of devices.
      expert_parallel: Gives each device whole experts instead of a slice of each. Without effect on one device.

    Raises:
      ValueError: `num_shards` does not divide the number of query heads, or the model has no experts to split.
    """
    experts = None
    if config.experts is not None:
        experts = ExpertLayout(
            num_shards=num_shards,
            num_experts=config.experts.num_experts,
            mlp_dim=config.experts.mlp_dim,
            is_by_expert=expert_parallel,
        )
    elif expert_parallel:
        raise ValueError(f"expert_parallel is set, but a {config.model_type} model has no experts. Leave it out.")
    return shard_layout(
        num_shards=num_shards,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        mlp_dim=config.mlp_dim,
        experts=experts,
    )


def tensors_of(config: ModelConfig, name: str) -> Tensors:
    """Returns the tensors that form a parameter, given by its path."""
    weight_map, stack = architecture_of(config).weight_map, stack_of(config, name)
    return weight_map.tables[name] if stack is None else weight_map.layers[stack.key]


@functools.lru_cache(maxsize=8)
def single_device_arrays(config: ModelConfig) -> dict[str, StoredArray]:
    """Returns each parameter by path as a single device holds it; for stacked parameters, one layer.

    They are in the order of the weight map.
    """
    _, abstract = abstract_model(config, model_layout(config, 1), jnp.dtype("float32"))
    arrays = {}
    for path, weight in nnx.to_flat_state(abstract):
        name = ".".join(map(str, path))
        num_stacked = 0 if stack_of(config, name) is None else 1
        sharded = [index for index, axis in enumerate(weight.axes[num_stacked:]) if axis in RULES]
        arrays[name] = StoredArray(weight.shape[num_stacked:], sharded[0] if sharded else None, name)
    weight_map = architecture_of(config).weight_map
    order = [*weight_map.tables, *weight_map.layers]

    def place(name: str) -> int:
        stack = stack_of(config, name)
        return order.index(name if stack is None else stack.key)

    return {name: arrays[name] for name in sorted(arrays, key=place)}


def stored_parts(config: ModelConfig) -> dict[str, dict[str, StoredArray]]:
    """Returns the arrays of each part of a checkpoint."""
    tables: dict[str, dict[str, StoredArray]] = {}
    layers: dict[str, dict[str, StoredArray]] = {part_of_layer(index): {} for index in range(config.num_layers)}
    for name, array in single_device_arrays(config).items():
        stack = stack_of(config, name)
        if stack is None:
            tables[name] = {name: array}
            continue
        for index, layer in enumerate(stack.layers):
            layers[part_of_layer(layer)][stack.key] = array._replace(stack_index=index)
    return tables | layers


def part_of_layer(layer: int) -> str:
    """Returns the name of a layer's part."""
    return f"layers.{layer:04d}"


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
    return {
        name: tensors_of(config, name).moved_pieces(StoredParameter(array.shape, config.head_dim), old, new)
        for name, array in single_device_arrays(config).items()
    }


def stored_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter of the model, keyed by path. Stacked parameters have pieces per layer."""

    def named(name: str, pieces: list[Piece]) -> Pieces:
        stack = stack_of(config, name)

        def of_layer(index: int) -> list[Piece]:
            tensor = name if stack is None else stored_name(part_of_layer(stack.layers[index]), stack.key)
            return [dataclasses.replace(piece, tensor=tensor) for piece in pieces]

        return of_layer

    moved = moved_pieces(config, model_layout(config, 1), layout)
    return {name: named(name, pieces) for name, pieces in moved.items()}


def num_weight_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Returns the bytes of the model without sharding and padding."""
    return sum(math.prod(shape) for shape in stored_shapes(config).values()) * dtype.itemsize
