"""The vocabulary in which a model class says what its parameters are called in a Hugging Face checkpoint.

A `WeightMap` is written once per model class (`qwen3_weights.py`). Everything else about names is derived from it:
which tensors a checkpoint must have and in which shapes, how they become parameters at any TP size, and the way back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.layout import ShardLayout


class StoredParameter(NamedTuple):
    """A parameter as one device alone would hold it, and the model's head dimension."""

    shape: tuple[int, ...]  # of one layer, where layers are stacked
    head_dim: int


class Tensors(Protocol):
    """The tensors that one parameter is made of."""

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """The rectangles that fill the parameter in a layout. `prefix` comes before each tensor's name."""


@dataclass(frozen=True)
class Whole:
    """One tensor of the parameter's own shape."""

    name: str

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        zeros = (0,) * len(stored.shape)
        return [Piece(prefix + self.name, zeros, stored.shape, zeros)]


@dataclass(frozen=True)
class SideBySide:
    """Tensors of one shape, which the parameter's first dimension numbers: its key is the index."""

    names: Mapping[int, str]

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        shape = stored.shape[1:]
        zeros = (0,) * len(shape)
        return [Piece(prefix + name, zeros, shape, (index, *zeros)) for index, name in self.names.items()]


@dataclass(frozen=True)
class FusedQKV:
    """The query, key and value projections, fused by group of heads as `ShardLayout.qkv_rows` describes it."""

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
    """Parameter -> tensors, in the order in which a checkpoint is written."""

    tables: Mapping[str, Tensors]
    layers: Mapping[str, Tensors]  # of each layer; `layer_prefix` comes before the tensors' names
    layer_prefix: str  # with {} in place of the layer's number
    tied_head: frozenset[str]  # names under which a tied checkpoint may repeat the embedding
