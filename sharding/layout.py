"""How the dimensions of a model fall onto the shards of a mesh: groups of heads, and padding to whole shards.

Any tensor-parallel degree that divides the query heads works. A shard holds whole *groups*: some query heads and the
one KV head they read. Up to as many shards as KV heads, a group is a KV head of the model with all its query heads.
Beyond that a KV head is repeated in neighbouring groups (0, 0, 1, 1, never 0, 1, 0, 1), each with a part of its query
heads, so that every shard still computes on its own block alone.
"""

import math
from dataclasses import dataclass


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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
