"""How the dimensions of a model fall onto the shards of a mesh: groups of heads, and padding to whole shards.

Any tensor-parallel degree that divides the query heads works. A shard holds whole *groups*: some query heads and the
one KV head they read. Up to as many shards as KV heads, a group is a KV head of the model with all its query heads.
Beyond that a KV head is repeated in neighbouring groups (0, 0, 1, 1, never 0, 1, 0, 1), each with a part of its query
heads, so that every shard still computes on its own block alone.

The fused projections are described here and nowhere else: `ShardLayout.qkv_rows` for queries, keys and values, `GATE`
and `UP` for the MLP. The model declares its arrays by it, checkpoints and resharding move rows by it, and the fused
decode kernels take blocks of that form (`LayerWeights`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


GATE, UP = 0, 1  # where the two projections of an MLP lie side by side in one array [2, F, D]


class HeadRows(NamedTuple):
    """Consecutive rows of the fused QKV array, and the rows of one projection of the model that they hold."""

    projection: str  # "q", "k" or "v"
    model_row: int  # first row in that projection
    num_rows: int
    group: int
    row: int  # first row in the group


class MovedRows(NamedTuple):
    """Rows of the fused QKV array in one layout, and where another layout has them."""

    old_group: int
    old_row: int
    num_rows: int
    group: int
    row: int


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Global sizes after grouping and padding; each divides by `num_shards`."""

    num_shards: int
    num_groups: int  # KV heads, repeats counted: the size of the cache's and QKV's head axis
    group_size: int  # query heads of a group
    repeats: int  # groups that hold the same KV head of the model
    vocab_size: int  # padded
    mlp_dim: int  # padded

    def kv_head(self, group: int) -> int:
        """The model's KV head that a group reads."""
        return group // self.repeats

    def qkv_shape(self, head_dim: int, embed_dim: int) -> tuple[int, int, int]:
        """The fused query, key and value projections: [K, (G + 2) * H, D], see `qkv_rows`."""
        return self.num_groups, (self.group_size + 2) * head_dim, embed_dim

    def qkv_rows(self, head_dim: int) -> Iterator[HeadRows]:
        """What each group of the fused QKV array holds: its query heads, then its key head, then its value head."""
        queries = self.group_size * head_dim
        for group in range(self.num_groups):
            kv_row = self.kv_head(group) * head_dim
            yield HeadRows("q", group * queries, queries, group, 0)
            yield HeadRows("k", kv_row, head_dim, group, queries)
            yield HeadRows("v", kv_row, head_dim, group, queries + head_dim)


def split_group(heads: Any) -> tuple[Any, Any, Any]:
    """Takes the heads of groups [..., G + 2, H] apart: queries [..., G, H], keys [..., H] and values [..., H]."""
    return heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]


def moved_qkv_rows(old: ShardLayout, new: ShardLayout, head_dim: int) -> list[MovedRows]:
    """How the fused QKV array of one layout is made of that of another, in as few rectangles as possible."""
    moves: list[MovedRows] = []
    held = list(old.qkv_rows(head_dim))
    for rows in new.qkv_rows(head_dim):
        start, end = rows.model_row, rows.model_row + rows.num_rows
        for source in held:  # in the order of the model's rows, so that of repeated KV heads the first is taken
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
    """Whether a move takes up where another ends, on both sides."""
    is_same_group = (one.old_group, one.group) == (other.old_group, other.group)
    rows = (one.old_row + one.num_rows, one.row + one.num_rows)
    return is_same_group and rows == (other.old_row, other.row)


def shard_layout(
    *, num_shards: int, num_query_heads: int, num_kv_heads: int, vocab_size: int, mlp_dim: int
) -> ShardLayout:
    """The layout for a tensor-parallel degree.

    Raises:
      ValueError: the degree does not divide the query heads.
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
        mlp_dim=round_up(mlp_dim, num_shards),
    )
