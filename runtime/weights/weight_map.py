"""Types with which a model class describes the names of its parameters in a Hugging Face checkpoint.

A `WeightMap` is written once per model class (`qwen3_weights.py`). Everything else is derived from it: which tensors a
checkpoint must have and their shapes, how they form parameters at any TP size, and the reverse mapping.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from meshserve.sharding.checkpoints.parameters import Piece
from meshserve.sharding.expert_layout import ExpertLayout, moved_experts
from meshserve.sharding.layout import ShardLayout, moved_qkv_rows


class StoredParameter(NamedTuple):
    """A parameter as a single device holds it, with the model's head dimension."""

    shape: tuple[int, ...]  # shape of one layer, for stacked parameters
    head_dim: int


class Tensors(Protocol):
    """The tensors that form one parameter."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """The tensors' names, without the prefix of a layer."""
        ...

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """Returns the rectangles that fill the parameter in a layout. `prefix` is prepended to each tensor's name."""

    def moved_pieces(self, stored: StoredParameter, old: ShardLayout, new: ShardLayout) -> list[Piece]:
        """Returns the rectangles of the parameter in an old layout that fill it in a new one; they name no tensor."""


class _Unmoved:
    """The map of a parameter that has the same form in every layout, but for padding at the end."""

    def moved_pieces(self, stored: StoredParameter, old: ShardLayout, new: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        zeros = (0,) * len(stored.shape)
        return [Piece("", zeros, stored.shape, zeros)]


@dataclass(frozen=True)
class Whole(_Unmoved):
    """One tensor with the shape of the parameter."""

    name: str

    @property
    def all_names(self) -> tuple[str, ...]:
        """See `Tensors`."""
        return (self.name,)

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        zeros = (0,) * len(stored.shape)
        return [Piece(prefix + self.name, zeros, stored.shape, zeros)]


@dataclass(frozen=True)
class SideBySide(_Unmoved):
    """Tensors of equal shape, stacked along the parameter's first dimension. The keys are the indices."""

    names: Mapping[int, str]

    @property
    def all_names(self) -> tuple[str, ...]:
        """See `Tensors`."""
        return tuple(self.names.values())

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

    @property
    def all_names(self) -> tuple[str, ...]:
        """See `Tensors`."""
        return (self.q, self.k, self.v)

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

    def moved_pieces(self, stored: StoredParameter, old: ShardLayout, new: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        embed_dim = stored.shape[-1]
        return [
            Piece("", (move.old_group, move.old_row, 0), (1, move.num_rows, embed_dim), (move.group, move.row, 0))
            for move in moved_qkv_rows(old, new, stored.head_dim)
        ]


@dataclass(frozen=True)
class PerExpert:
    """A matrix of every expert, in the blocks of `ShardLayout.experts`.

    The keys of `names`, with {} for the expert, are indices of the parameter's second dimension; None if it has none.
    """

    names: Mapping[int | None, str]
    mlp_axis: int  # axis of the tensors that is the intermediate dimension

    @property
    def all_names(self) -> tuple[str, ...]:
        """See `Tensors`. They have {} for the expert."""
        return tuple(self.names.values())

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        found = []
        for row, (first, num_experts, mlp_start, mlp_size) in _experts_of(layout).rectangles():
            start, size = (mlp_start, 0), (mlp_size, stored.shape[-1])
            if self.mlp_axis == 1:
                start, size = (0, mlp_start), (stored.shape[-2], mlp_size)
            for index in range(num_experts):
                for key, name in self.names.items():
                    place = (row + index, *([] if key is None else [key]), 0, 0)
                    found.append(Piece(prefix + name.format(first + index), start, size, place))
        return found

    def moved_pieces(self, stored: StoredParameter, old: ShardLayout, new: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        axis = len(stored.shape) - 2 + self.mlp_axis

        def rectangle(row: int, mlp: int) -> tuple[int, ...]:
            return tuple(row if at == 0 else mlp if at == axis else 0 for at in range(len(stored.shape)))

        return [
            Piece(
                "",
                rectangle(move.old_row, move.old_mlp),
                (move.num_experts, *stored.shape[1:axis], move.mlp_size, *stored.shape[axis + 1 :]),
                rectangle(move.row, move.mlp),
            )
            for move in moved_experts(_experts_of(old), _experts_of(new))
        ]


def _experts_of(layout: ShardLayout) -> ExpertLayout:
    assert layout.experts is not None
    return layout.experts


@dataclass(frozen=True)
class PerKVHead:
    """Numbers that belong to a layer's keys and to its values, one for all KV heads, repeated as [K, 2]."""

    k: str
    v: str

    @property
    def all_names(self) -> tuple[str, ...]:
        """See `Tensors`."""
        return (self.k, self.v)

    def pieces(self, prefix: str, stored: StoredParameter, layout: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        names = enumerate(self.all_names)
        return [
            Piece(prefix + name, (0,), (1,), (group, index))
            for index, name in names
            for group in range(layout.num_groups)
        ]

    def moved_pieces(self, stored: StoredParameter, old: ShardLayout, new: ShardLayout) -> list[Piece]:
        """See `Tensors`."""
        held = [new.kv_head(group) * old.repeats for group in range(new.num_groups)]
        return [Piece("", (old_group, 0), (1, 2), (group, 0)) for group, old_group in enumerate(held)]


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Mapping of parameters to tensors, in the order in which a checkpoint is written."""

    tables: Mapping[str, Tensors]
    layers: Mapping[str, Tensors]  # per layer; `layer_prefix` is prepended to the tensors' names
    layer_prefix: str  # with {} for the layer index
    projections: frozenset[str]  # keys of `layers`: the matrices that a checkpoint may quantize
    tied_head: Mapping[str, str]  # tensor that a checkpoint with tied embeddings may repeat -> the one it repeats
    # Names that some writers give to tensors of a layer -> those of this map.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Tensors [E, rows, columns] in which some writers store the matrices of all experts -> the modules that share its
    # rows, with {} for the expert; all per layer.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
