"""Maps parameters to tensors of a Hugging Face checkpoint, using the weight map of the model class."""

import dataclasses
import itertools
from collections.abc import Mapping

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout

from ..model_files.model_config import ModelConfig
from .formats.stored_matrix import StoredMatrix
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

_KV_SCALE = "attention.kv_scale"  # in the weight maps


def checkpoint_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the model needs, as if no matrix were quantized."""
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in _stored_pieces_of_tensors(with_plain_matrices(config)):
        for piece in pieces:
            ends = [start + size for start, size in zip(piece.start, piece.size, strict=True)]
            shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def quantized_matrices(config: ModelConfig) -> dict[str, StoredMatrix]:
    """Returns the matrices that a quantized checkpoint stores, by the tensors of `checkpoint_tensors` they replace."""
    quantization, architecture = config.quantization, architecture_of(config)
    if quantization is None or quantization.layout is None:
        return {}
    modules = set(itertools.chain(*architecture.projection_modules(config).values()))
    modules |= {name.removesuffix(".weight") for name in architecture.weight_map.tables["head"].all_names}
    found = {}
    for name, shape in checkpoint_tensors(config).items():
        module = name.removesuffix(".weight")
        if module in modules and not quantization.skips(module):
            rows, columns = shape
            own = quantization.of_module(module)
            assert own.layout is not None
            found[name] = own.layout(module, rows, columns, own)
    return found


def partly_quantized(config: ModelConfig, matrices: Mapping[str, StoredMatrix]) -> dict[str, str]:
    """Returns each projection of which a checkpoint quantizes some modules only, and the first one that it does not.

    Args:
      config: The model.
      matrices: See `quantized_matrices`.
    """
    tensors, found = checkpoint_tensors(config), {}
    for key, modules in architecture_of(config).projection_modules(config).items():
        stored = [f"{module}.weight" for module in modules if f"{module}.weight" in tensors]
        plain = [name for name in stored if name not in matrices]
        if 0 < len(plain) < len(stored):
            found[key] = plain[0].removesuffix(".weight")
    return found


def dequantized_tensors(config: ModelConfig) -> list[str]:
    """Returns the names of the tensors of `checkpoint_tensors` that are dequantized while they are loaded."""
    names, weight_map = (
        config.quantization.dequantized if config.quantization is not None else (),
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
    scales = frozenset() if config.quantization is None or config.quantization.has_kv_scales else kv_scales(config)
    return tied.union(scales, *(matrix.unused() for matrix in quantized_matrices(config).values()))


def kv_scales(config: ModelConfig) -> frozenset[str]:
    """Returns the names of the scales of an FP8 cache that a checkpoint may contain."""
    weight_map = architecture_of(config).weight_map
    names = weight_map.layers[_KV_SCALE].all_names
    return frozenset(
        weight_map.layer_prefix.format(layer) + name for layer in range(config.num_layers) for name in names
    )


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
