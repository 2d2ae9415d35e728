"""Maps parameters to tensors of a Hugging Face checkpoint, using the weight map of the model class."""

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ModelConfig
from .orbax_layout import (
    STACK,
    Pieces,
    layer_arrays,
    model_layout,
    part_of_layer,
    stored_name,
    table_arrays,
)
from .registry import architecture_of
from .weight_map import StoredParameter, Tensors


def checkpoint_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for _, pieces in _stored_pieces_of_tensors(config):
        for piece in pieces:
            ends = [start + size for start, size in zip(piece.start, piece.size, strict=True)]
            shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def tensors_to_ignore(config: ModelConfig) -> frozenset[str]:
    """Returns the names of tensors that a checkpoint may contain but the model does not need."""
    return frozenset(architecture_of(config).weight_map.tied_head if config.is_tied else ())


def hf_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """Returns the pieces of each parameter by its path in the model. Stacked parameters have pieces per layer."""
    weight_map = architecture_of(config).weight_map

    def pieces_of(tensors: Tensors, shape: tuple[int, ...], prefix: str = "") -> Pieces:
        stored = StoredParameter(shape, config.head_dim)
        return lambda layer: tensors.pieces(prefix.format(layer), stored, layout)

    tables = {name: pieces_of(weight_map.tables[name], array.shape) for name, array in table_arrays(config).items()}
    layers = {
        STACK + key: pieces_of(weight_map.layers[key], array.shape, weight_map.layer_prefix)
        for key, array in layer_arrays(config).items()
    }
    return tables | layers


def _stored_pieces_of_tensors(config: ModelConfig) -> list[tuple[str, list[Piece]]]:
    """Returns each array of an Orbax checkpoint by name, with the pieces of Hugging Face tensors that form it."""
    weight_map, pieces = architecture_of(config).weight_map, hf_pieces(config, model_layout(config, 1))
    found = [(name, pieces[name](0)) for name in weight_map.tables if name in pieces]
    for layer in range(config.num_layers):
        part = part_of_layer(layer)
        found += [(stored_name(part, key), pieces[STACK + key](layer)) for key in weight_map.layers]
    return found
