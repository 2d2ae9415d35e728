"""Where each parameter's numbers stand in a Hugging Face checkpoint, by the weight map of the model's class."""

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
    """Name and shape of every tensor the model needs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for _, pieces in _stored_pieces_of_tensors(config):
        for piece in pieces:
            ends = [start + size for start, size in zip(piece.start, piece.size, strict=True)]
            shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    return shapes


def tensors_to_ignore(config: ModelConfig) -> frozenset[str]:
    """Tensors that a checkpoint may have and the model does not need."""
    return architecture_of(config).weight_map.tied_head if config.is_tied else frozenset()


def hf_pieces(config: ModelConfig, layout: ShardLayout) -> dict[str, Pieces]:
    """The pieces of each parameter, by its path in the model; stacked ones layer by layer."""
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
    """Each array of an Orbax checkpoint, by name, and the pieces of Hugging Face tensors that it is made of."""
    weight_map, pieces = architecture_of(config).weight_map, hf_pieces(config, model_layout(config, 1))
    found = [(name, pieces[name](0)) for name in weight_map.tables if name in pieces]
    for layer in range(config.num_layers):
        part = part_of_layer(layer)
        found += [(stored_name(part, key), pieces[STACK + key](layer)) for key in weight_map.layers]
    return found
