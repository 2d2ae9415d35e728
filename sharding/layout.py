"""Maps a model's dimensions to the shards of a mesh: groups of heads, and padding to whole shards.

Any tensor-parallel size that divides the number of query heads is supported. A shard holds whole *groups*: some query
heads and the one KV head that they read. With at most as many shards as KV heads, a group is one KV head of the model
with all its query heads. With more shards, each KV head is repeated in neighboring groups (0, 0, 1, 1, never 0, 1, 0,
1), each with a part of its query heads, so that every shard still computes on its own block alone. Neighboring shards
that repeat one KV head may also divide its pages among them (`cp`): each then stores 1 / cp of a page's tokens.

This module alone describes the fused projections: `ShardLayout.qkv_rows` for queries, keys and values, `GATE` and `UP`
for the MLP. The model declares its arrays in this layout, checkpoints and resharding move rows according to it, and the
fused decode kernels take blocks in this form (`LayerWeights`).
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .expert_layout import ExpertLayout


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


GATE, UP = 0, 1  # indices of the two MLP projections in their fused array [2, F, D]


class HeadRows(NamedTuple):
    """Consecutive rows of the fused QKV array, and the rows of the model's projection that they hold."""

    projection: str  # "q", "k" or "v"
    model_row: int  # first row in that projection
    num_rows: int
    group: int
    row: int  # first row in the group


class MovedRows(NamedTuple):
    """Consecutive rows of the fused QKV array in an old layout, and their place in a new one."""

    old_group: int
    old_row: int
    num_rows: int
    group: int
    row: int


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Global sizes after grouping and padding; all but `group_size` and `repeats` are multiples of `num_shards`."""

    num_shards: int
    num_groups: int  # KV heads including repeats: the size of the head axis of the cache and of QKV
    group_size: int  # query heads per group
    repeats: int  # number of groups that hold the same KV head of the model
    vocab_size: int  # padded
    mlp_dim: int  # padded
    experts: ExpertLayout | None = None  # for a mixture-of-experts model
    cp: int = 1  # neighboring shards that divide the pages of the KV head that they repeat

    @property
    def max_cp(self) -> int:
        """The number of shards that repeat a KV head; 1 if a shard holds several heads or groups."""
        return self.repeats if self.num_groups == self.num_shards else 1

    def with_cp(self, cp: int) -> "ShardLayout":
        """Returns this layout with each page divided among `cp` shards.

        Raises:
          ValueError: A KV head is not repeated on a multiple of `cp` shards.
        """
        if self.max_cp % cp:
            allowed = ", ".join(str(size) for size in range(1, self.max_cp + 1) if self.max_cp % size == 0)
            raise ValueError(
                f"cp is {cp}, but at tp {self.num_shards} a KV head of the model is on {self.max_cp} device(s), which "
                f"can divide its pages among them. Use cp {allowed}, or another tp."
            )
        return dataclasses.replace(self, cp=cp)

    def kv_head(self, group: int) -> int:
        """Returns the model's KV head that a group reads."""
        return group // self.repeats

    def qkv_shape(self, head_dim: int, embed_dim: int) -> tuple[int, int, int]:
        """Returns the shape of the fused query, key and value projections, [K, (G + 2) * H, D]; see `qkv_rows`."""
        return self.num_groups, (self.group_size + 2) * head_dim, embed_dim

    def qkv_rows(self, head_dim: int) -> Iterator[HeadRows]:
        """Yields the rows of each group of the fused QKV array: its query heads, its key head, then its value head."""
        queries = self.group_size * head_dim
        for group in range(self.num_groups):
            kv_row = self.kv_head(group) * head_dim
            yield HeadRows("q", group * queries, queries, group, 0)
            yield HeadRows("k", kv_row, head_dim, group, queries)
            yield HeadRows("v", kv_row, head_dim, group, queries + head_dim)


def split_group(heads: Any) -> tuple[Any, Any, Any]:
    """Splits the heads of groups [..., G + 2, H] into queries [..., G, H], keys [..., H] and values [..., H]."""
    return heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]


def moved_qkv_rows(old: ShardLayout, new: ShardLayout, head_dim: int) -> list[MovedRows]:
    """Returns the row moves that turn one layout's fused QKV array into another's, merged into as few as possible."""
    moves: list[MovedRows] = []
    held = list(old.qkv_rows(head_dim))
    for rows in new.qkv_rows(head_dim):
        start, end = rows.model_row, rows.model_row + rows.num_rows
        for source in held:  # in the order of the model's rows; the first of repeated KV heads is used
            last = min(end, source.model_row + source.num_rows)
            if source.projection != rows.projection or source.model_row > start or last <= start:
                continue
            old_row = source.row + start - source.model_row
            move = MovedRows(source.group, old_row, last - start, rows.group, rows.row + start - rows.model_row)
            if moves and _continues(moves[-1], move):
                moves[-1] = moves[-1]._replace(num_rows=moves[-1].num_rows + move.num_rows)
            else:
                moves.append(move)
            start = last
    return moves


def _continues(one: MovedRows, other: MovedRows) -> bool:
    """Returns whether one move continues where another ends, in both layouts."""
    is_same_group = (one.old_group, one.group) == (other.old_group, other.group)
    rows = (one.old_row + one.num_rows, one.row + one.num_rows)
    return is_same_group and rows == (other.old_row, other.row)


def shard_layout(
    *,
    num_shards: int,
    num_query_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    mlp_dim: int,
    mlp_unit: int = 1,
    experts: ExpertLayout | None = None,
) -> ShardLayout:
    """Returns the layout for a tensor-parallel size. A shard of the MLP is a multiple of `mlp_unit`.

    Raises:
      ValueError: `num_shards` does not divide the number of query heads.
    """
    if num_query_heads % num_shards:
        allowed = [tp_size for tp_size in range(1, num_query_heads + 1) if num_query_heads % tp_size == 0]
        raise ValueError(
            f"tp is {num_shards}, which does not divide the model's {num_query_heads} query heads. Use one of "
            f"{', '.join(map(str, allowed))}."
        )
    group_size = math.gcd(num_query_heads // num_kv_heads, num_query_heads // num_shards)
    num_groups = num_query_heads // group_size
    return ShardLayout(
        num_shards=num_shards,
        num_groups=num_groups,
        group_size=group_size,
        repeats=num_groups // num_kv_heads,
        vocab_size=round_up(vocab_size, num_shards),
        mlp_dim=round_up(mlp_dim, num_shards * mlp_unit),
        experts=experts,
    )
