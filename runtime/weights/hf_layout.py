"""Maps parameters to tensors of a Hugging Face checkpoint, using the weight map of the model class."""

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ModelConfig
from .orbax_layout import Pieces, model_layout, single_device_arrays, stack_of, stored_parts, tensors_of
from .registry import architecture_of
from .weight_map import StoredParameter


def checkpoint_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in _stored_pieces_of_tensors(config):
        for piece in pieces:
            ends = [start + size for start, size in zip(piece.start, piece.size, strict=True)]
            shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def tensors_to_ignore(config: ModelConfig) -> frozenset[str]:
    """Returns the names of tensors that a checkpoint may contain but the model does not need."""
    return frozenset(architecture_of(config).weight_map.tied_head if config.is_tied else ())


def hf_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter by its path in the model. Stacked parameters have pieces per layer."""
    layer_prefix = architecture_of(config).weight_map.layer_prefix

    def pieces_of(name: str, shape: tuple[int, ...]) -> Pieces:
        tensors, stack = tensors_of(config, name), stack_of(config, name)
        stored = StoredParameter(shape, config.head_dim)
        if stack is None:
            return lambda _: tensors.pieces("", stored, layout)
        return lambda index: tensors.pieces(layer_prefix.format(stack.layers[index]), stored, layout)

    return {name: pieces_of(name, array.shape) for name, array in single_device_arrays(config).items()}


def _stored_pieces_of_tensors(config: ModelConfig) -> list[list[Piece]]:
    """Returns, for each array of an Orbax checkpoint, the pieces of Hugging Face tensors that form it."""
    pieces = hf_pieces(config, model_layout(config, 1))
    arrays = [array for part in stored_parts(config).values() for array in part.values()]
    return [pieces[array.parameter](array.stack_index) for array in arrays]
