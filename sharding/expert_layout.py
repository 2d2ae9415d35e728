"""Maps the experts of a mixture-of-experts model to the shards of a mesh.

Every shard holds one *block* of the experts, a rectangle of (expert, row of the intermediate dimension):

* split by tensor, all experts and a slice of each one's intermediate dimension;
* split by expert (expert parallelism), some experts whole.

Stacked over the shards, both are arrays of one form, `[shards * experts of a block, ...]`, sharded along their first
dimension only. The model declares its arrays in this form, and checkpoints and resharding move rectangles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class ExpertRectangle(NamedTuple):
    """Consecutive experts and a slice of their intermediate dimension, without padding."""

    expert: int  # first of the model's experts
    num_experts: int
    mlp_start: int  # in the model's intermediate dimension
    mlp_size: int


class MovedExperts(NamedTuple):
    """A rectangle of expert weights in an old layout, and its place in a new one."""

    old_row: int  # along the first dimension of the stacked blocks
    old_mlp: int  # in the block
    row: int
    mlp: int
    num_experts: int
    mlp_size: int


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Which experts each shard holds. Blocks are padded to equal sizes; padding is never chosen or adds zero."""

    num_shards: int
    num_experts: int  # in the model
    mlp_dim: int  # intermediate size of an expert of the model
    is_by_expert: bool
    mlp_unit: int = 1  # rows that are never split, such as those that share a scale

    @property
    def block_experts(self) -> int:
        """Experts of a block."""
        return -(-self.num_experts // self.num_shards) if self.is_by_expert else self.num_experts

    @property
    def block_mlp_dim(self) -> int:
        """Intermediate size of a block."""
        if self.is_by_expert:
            return self.mlp_dim
        return min(self.mlp_dim, -(-self.mlp_dim // (self.num_shards * self.mlp_unit)) * self.mlp_unit)

    @property
    def num_rows(self) -> int:
        """Experts of all blocks together: the size of the sharded dimension."""
        return self.num_shards * self.block_experts

    def first_expert(self, shard: Any) -> Any:
        """Returns the model's expert that is the first of a shard's block; the shard is a number or a traced one."""
        return shard * self.block_experts if self.is_by_expert else 0

    def rectangles(self) -> Iterator[tuple[int, ExpertRectangle]]:
        """Yields what each shard's block holds, with the block's first row; nothing for blocks of padding alone."""
        for shard in range(self.num_shards):
            expert = self.first_expert(shard)
            mlp_start = 0 if self.is_by_expert else shard * self.block_mlp_dim
            num_experts = min(self.block_experts, self.num_experts - expert)
            mlp_size = min(self.block_mlp_dim, self.mlp_dim - mlp_start)
            if num_experts > 0 and mlp_size > 0:
                yield shard * self.block_experts, ExpertRectangle(expert, num_experts, mlp_start, mlp_size)


def moved_experts(old: ExpertLayout, new: ExpertLayout) -> Iterator[MovedExperts]:
    """Yields the moves that turn one layout's blocks into another's."""
    for row, target in new.rectangles():
        for old_row, source in old.rectangles():
            expert = max(source.expert, target.expert)
            mlp = max(source.mlp_start, target.mlp_start)
            last_expert = min(source.expert + source.num_experts, target.expert + target.num_experts)
            last_mlp = min(source.mlp_start + source.mlp_size, target.mlp_start + target.mlp_size)
            if expert < last_expert and mlp < last_mlp:
                yield MovedExperts(
                    old_row=old_row + expert - source.expert,
                    old_mlp=mlp - source.mlp_start,
                    row=row + expert - target.expert,
                    mlp=mlp - target.mlp_start,
                    num_experts=last_expert - expert,
                    mlp_size=last_mlp - mlp,
                )
