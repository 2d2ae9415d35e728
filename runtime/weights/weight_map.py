"""Types with which a model class describes the names of its parameters in a Hugging Face checkpoint.

A `WeightMap` is written once per model class (`qwen3_weights.py`). Everything else is derived from it: which tensors a
checkpoint must have and their shapes, how they form parameters at any TP size, and the reverse mapping.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout


class StoredParameter(NamedTuple):
    """A parameter as a single device holds it, with the model's head dimension."""

    shape: tuple[int, ...]  # shape of one layer, for stacked parameters
    head_dim: int


class Tensors(Protocol):
    """The tensors that form one parameter."""

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """Returns the rectangles that fill the parameter in a layout. `prefix` is prepended to each tensor's name."""


@dataclass(frozen=True)
class Whole:
    """One tensor with the shape of the parameter."""

    name: str

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        zeros = (0,) * len(stored.shape)
        return [Piece(prefix + self.name, zeros, stored.shape, zeros)]


@dataclass(frozen=True)
class SideBySide:
    """Tensors of equal shape, stacked along the parameter's first dimension. The keys are the indices."""

    names: Mapping[int, str]

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        shape = stored.shape[1:]
        zeros = (0,) * len(shape)
        return [Piece(prefix + name, zeros, shape, (index, *zeros)) for index, name in self.names.items()]


@dataclass(frozen=True)
class FusedQKV:
    """The query, key and value projections, fused per group of heads as in `ShardLayout.qkv_rows`."""

    q: str
    k: str
    v: str

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        embed_dim = stored.shape[-1]
        return [
            Piece(
                prefix + getattr(self, rows.projection),
                (rows.model_row, 0),
                (rows.num_rows, embed_dim),
                (rows.group, rows.row, 0),
            )
            for rows in layout.qkv_rows(stored.head_dim)
        ]


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Mapping of parameters to tensors, in the order in which a checkpoint is written."""

    tables: Mapping[str, Tensors]
    layers: Mapping[str, Tensors]  # per layer; `layer_prefix` is prepended to the tensors' names
    layer_prefix: str  # with {} for the layer index
    tied_head: Mapping[str, str]  # tensor that a checkpoint with tied embeddings may repeat -> the one it repeats
