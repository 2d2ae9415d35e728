"""Maps parameters to tensors of a Hugging Face checkpoint, using the weight map of the model class."""

import dataclasses

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ModelConfig
from ..quantisation.config_json import is_skipped
from ..quantisation.published import StoredMatrix, stored_matrix
from ..quantisation.quantise import is_made
from .orbax_layout import (
    Pieces,
    StoredArray,
    model_layout,
    parameters_in,
    single_device_arrays,
    stack_of,
    stored_parts,
    tensors_of,
    with_plain_matrices,
)
from .registry import architecture_of
from .weight_map import StoredParameter


def checkpoint_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the model needs, as if no matrix were quantised."""
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in _stored_pieces_of_tensors(with_plain_matrices(config)):
        for piece in pieces:
            ends = [start + size for start, size in zip(piece.start, piece.size, strict=True)]
            shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def quantised_matrices(config: ModelConfig) -> dict[str, StoredMatrix]:
    """Returns the matrices that a quantised checkpoint stores, by the tensors of `checkpoint_tensors` they replace."""
    quantisation, weight_map = config.quantisation, architecture_of(config).weight_map
    if quantisation is None or is_made(quantisation):
        return {}
    num_experts = config.experts.num_experts if config.experts is not None else 1
    names = {
        weight_map.layer_prefix.format(layer) + name.format(expert)  # of a name without {}, the name
        for key in weight_map.projections
        for name in weight_map.layers[key].all_names
        for layer in range(config.num_layers)
        for expert in range(num_experts if "{}" in name else 1)
    } | set(weight_map.tables["head"].all_names)
    found = {}
    for name, shape in checkpoint_tensors(config).items():
        module = name.removesuffix(".weight")
        if name in names and not is_skipped(module, quantisation.skipped):
            rows, columns = shape
            found[name] = stored_matrix(module, rows, columns, quantisation)
    return found


def dequantised_tensors(config: ModelConfig) -> list[str]:
    """Returns the names of the tensors of `checkpoint_tensors` that are dequantised while they are loaded."""
    names, weight_map = (
        config.quantisation.dequantised if config.quantisation is not None else (),
        architecture_of(config).weight_map,
    )
    return [
        weight_map.layer_prefix.format(layer) + tensor
        for key, tensors in weight_map.layers.items()
        if f"layers.{key}" in names
        for tensor in tensors.all_names
        for layer in range(config.num_layers)
    ]


def tensors_to_ignore(config: ModelConfig) -> frozenset[str]:
    """Returns the names of tensors that a checkpoint may contain but the model does not need."""
    tied = frozenset(architecture_of(config).weight_map.tied_head if config.is_tied else ())
    order = frozenset(f"{matrix.module}.g_idx" for matrix in quantised_matrices(config).values())
    return tied | order


def hf_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter by its path in the model. Stacked parameters have pieces per layer."""
    layer_prefix, parameters = architecture_of(config).weight_map.layer_prefix, parameters_in(config, layout)

    def pieces_of(array: StoredArray) -> Pieces:
        parameter, tensors = parameters[array.parameter], tensors_of(config, array)
        stored, stack = StoredParameter(array.matrix_shape, config.head_dim), stack_of(config, array.parameter)

        def of_layer(index: int) -> list[Piece]:
            prefix = "" if stack is None else layer_prefix.format(stack.layers[index])
            found = parameter.in_granules(tensors.pieces(prefix, stored, layout))
            return [dataclasses.replace(piece, tensor=parameter.part_name(piece.tensor)) for piece in found]

        return of_layer

    return {name: pieces_of(array) for name, array in single_device_arrays(config).items()}


def _stored_pieces_of_tensors(config: ModelConfig) -> list[list[Piece]]:
    """Returns, for each array of an Orbax checkpoint, the pieces of Hugging Face tensors that form it."""
    pieces = hf_pieces(config, model_layout(config, 1))
    arrays = [array for part in stored_parts(config).values() for array in part.values()]
    return [pieces[array.parameter](array.stack_index) for array in arrays]
