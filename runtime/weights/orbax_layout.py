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

from ..model_files.model_config import ModelConfig
from .formats.grids import Granule, PartName
from .registry import abstract_model, architecture_of
from .weight_map import StoredParameter, Tensors

Pieces = Callable[[int], list[Piece]]  # pieces of a parameter per layer of its stack; unstacked ones have only layer 0

_FLOAT32 = jnp.dtype("float32")


class Stack(NamedTuple):
    """The place of a parameter that is stacked over layers."""

    key: str  # name of the parameter in a layer
    layers: tuple[int, ...]  # the model's layers in the order of the stack


class StoredArray(NamedTuple):
    """An array of the checkpoint, or a parameter of a model in some layout; of one layer, if layers are stacked."""

    shape: tuple[int, ...]
    sharded_axis: int | None  # axis that is sharded for serving, if any
    parameter: str  # path of the model's parameter that it belongs to
    dtype: jnp.dtype
    stack_index: int = 0  # in the parameter's stack
    granule: Granule | None = None  # rows and columns that an element of a part of a quantized matrix describes

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the matrix that this is a part of; its own shape if it is none."""
        if self.granule is None:
            return self.shape
        *leading, rows, columns = self.shape
        return (*leading, rows * self.granule[0], columns * self.granule[1])

    def matrix_name(self, name: str) -> str:
        """Returns a name of this without the part, if it is part of a quantized matrix."""
        return name if self.granule is None else name.rpartition(".")[0]

    def part_name(self, matrix: str) -> str:
        """Returns what a `Source` is asked for: `matrix`, or the part of it that this is."""
        part = self.parameter.rpartition(".")[2]
        return matrix if self.granule is None else str(PartName(matrix, part, self.granule))

    def in_granules(self, pieces: list[Piece]) -> list[Piece]:
        """Converts pieces of the matrix to pieces of this part of it."""
        return pieces if self.granule is None else [_in_granules(piece, self.granule) for piece in pieces]


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
            mlp_unit=1 if config.quantization is None else config.quantization.expert_unit,
        )
    elif expert_parallel:
        raise ValueError(f"expert_parallel is set, but a {config.model_type} model has no experts. Leave it out.")
    return shard_layout(
        num_shards=num_shards,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        mlp_dim=config.mlp_dim,
        mlp_unit=1 if config.quantization is None else config.quantization.format.packed,  # whole bytes
        experts=experts,
    )


def with_plain_matrices(config: ModelConfig) -> ModelConfig:
    """Returns the config of the same model with no matrix quantized."""
    quantization = config.quantization
    if quantization is not None:
        quantization = dataclasses.replace(quantization, parameters=frozenset())
    return dataclasses.replace(config, quantization=quantization, head_quantization=None)


def tensors_of(config: ModelConfig, array: StoredArray) -> Tensors:
    """Returns the tensors that form a parameter, or the matrix that it is part of."""
    weight_map, name = architecture_of(config).weight_map, array.matrix_name(array.parameter)
    stack = stack_of(config, name)
    return weight_map.tables[source_table(config, name)] if stack is None else weight_map.layers[stack.key]


def source_table(config: ModelConfig, name: str) -> str:
    """Returns the table that an unstacked parameter is loaded from: itself, or the embedding for a tied head."""
    return "embedding" if name == "head" and config.is_tied else name


@functools.lru_cache(maxsize=16)
def parameters_in(config: ModelConfig, layout: ShardLayout, dtype: jnp.dtype = _FLOAT32) -> dict[str, StoredArray]:
    """Returns each parameter by path, in a layout; for stacked parameters, one layer.

    They are in the order of the weight map. `dtype` is that of all that are not part of a quantized matrix.
    """
    _, abstract = abstract_model(config, layout, dtype)
    arrays = {}
    for path, weight in nnx.to_flat_state(abstract):
        name = ".".join(map(str, path))
        num_stacked = 0 if stack_of(config, name) is None else 1
        sharded = [index for index, axis in enumerate(weight.axes[num_stacked:]) if axis in RULES]
        arrays[name] = StoredArray(
            weight.shape[num_stacked:],
            sharded[0] if sharded else None,
            name,
            weight.get_value().dtype,
            granule=weight.get_metadata().get("granule"),
        )
    weight_map = architecture_of(config).weight_map
    order = [*weight_map.tables, *weight_map.layers]

    def place(name: str) -> int:
        matrix = arrays[name].matrix_name(name)
        stack = stack_of(config, matrix)
        return order.index(matrix if stack is None else stack.key)

    return {name: arrays[name] for name in sorted(arrays, key=place)}


def single_device_arrays(config: ModelConfig, dtype: jnp.dtype = _FLOAT32) -> dict[str, StoredArray]:
    """Returns `parameters_in` the layout of a single device."""
    return parameters_in(config, model_layout(config, 1), dtype)


def stored_parts(config: ModelConfig, dtype: jnp.dtype = _FLOAT32) -> dict[str, dict[str, StoredArray]]:
    """Returns the arrays of each part of a checkpoint."""
    tables: dict[str, dict[str, StoredArray]] = {}
    layers: dict[str, dict[str, StoredArray]] = {part_of_layer(index): {} for index in range(config.num_layers)}
    for name, array in single_device_arrays(config, dtype).items():
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


def dequantized_arrays(config: ModelConfig) -> list[str]:
    """Returns the names of matrices that are dequantized while they are loaded, without the part."""
    names = config.quantization.dequantized if config.quantization is not None else ()
    parts = stored_parts(config).items()
    return [stored_name(part, key) for part, arrays in parts for key in arrays if arrays[key].parameter in names]


def stored_name(part: str, key: str) -> str:
    """Returns the name of an array in a part."""
    return part if key == part else f"{part}.{key}"


def moved_pieces(
    config: ModelConfig, old: ShardLayout, new: ShardLayout, *, is_common: bool = False
) -> dict[str, list[Piece]]:
    """Returns the pieces that convert each parameter from one layout to another; for stacked parameters, of one layer.

    The pieces refer to the same parameter in the old layout and have no tensor name. Regions without a piece are
    padding. Grids of scales have the new layout's granules (see `grids.regrid_indices`), or with `is_common` those that
    divide both layouts' (`common_granule`), for old grids that begin anywhere in the matrix.
    """
    before, moved = parameters_in(config, old), parameters_in(config, new)

    def pieces(array: StoredArray) -> list[Piece]:
        stored, target = StoredParameter(array.matrix_shape, config.head_dim), moved[array.parameter]
        if is_common:
            target = target._replace(granule=common_granule(before[array.parameter].granule, target.granule))
        return target.in_granules(tensors_of(config, array).moved_pieces(stored, old, new))

    return {name: pieces(array) for name, array in single_device_arrays(config).items()}


def common_granule(one: Granule | None, other: Granule | None) -> Granule | None:
    """Returns the largest granule that divides both; None if there is none, as for what is no part of a matrix."""
    return None if one is None or other is None else (math.gcd(one[0], other[0]), math.gcd(one[1], other[1]))


def stored_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter of the model, keyed by path. Stacked parameters have pieces per layer."""
    parameters = parameters_in(config, layout)

    def named(name: str, pieces: list[Piece]) -> Pieces:
        array = parameters[name]
        matrix = array.matrix_name(name)
        stack = stack_of(config, matrix)

        def of_layer(index: int) -> list[Piece]:
            stored = source_table(config, matrix)
            if stack is not None:
                stored = stored_name(part_of_layer(stack.layers[index]), stack.key)
            return [dataclasses.replace(piece, tensor=array.part_name(stored)) for piece in pieces]

        return of_layer

    moved = moved_pieces(config, model_layout(config, 1), layout)
    return {name: named(name, pieces) for name, pieces in moved.items()}


def _in_granules(piece: Piece, granule: Granule) -> Piece:
    sizes = (*(1,) * (len(piece.size) - 2), *granule)
    place_sizes = (*(1,) * (len(piece.place) - 2), *granule)
    return dataclasses.replace(
        piece,
        start=tuple(start // size for start, size in zip(piece.start, sizes, strict=True)),
        size=tuple(-(-length // size) for length, size in zip(piece.size, sizes, strict=True)),
        place=tuple(start // size for start, size in zip(piece.place, place_sizes, strict=True)),
    )
