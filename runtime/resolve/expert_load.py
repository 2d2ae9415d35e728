"""How many experts a step reads and how many tokens go through them, on the device that has the most to do.

Tokens choose experts uniformly and independently. If experts are split by tensor, each device reads its slice of all
those chosen. If they are split by expert, the devices differ, and the busiest one decides how long the step takes.
"""

import functools
from typing import NamedTuple

import numpy as np

from meshserve.sharding.layout import ShardLayout

from ..model_files.model_config import ExpertsConfig

_NUM_DRAWS = 32  # of choices of experts, to find the load of the busiest device
_MOST_TOKENS = 1024  # drawn; beyond that, every expert is read and the devices differ little


class ExpertLoad(NamedTuple):
    """What the busiest device does in one layer, on average."""

    num_experts: float  # experts of its block that are read
    num_choices: float  # tokens that go through an expert of its block, counted once per expert


def expert_load(experts: ExpertsConfig, layout: ShardLayout, num_tokens: int) -> ExpertLoad:
    """Returns the load of a step of `num_tokens` tokens."""
    assert layout.experts is not None
    num_blocks = layout.num_shards if layout.experts.is_by_expert else 1
    return _busiest(experts.num_experts, experts.num_chosen, num_blocks, num_tokens)


@functools.lru_cache(maxsize=1024)
def _busiest(num_experts: int, num_chosen: int, num_blocks: int, num_tokens: int) -> ExpertLoad:
    """Returns the load of the busiest of `num_blocks` blocks. Drawn with a fixed seed where there are several."""
    if num_blocks == 1:
        read = num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)
        return ExpertLoad(read, num_tokens * num_chosen)
    rng, num_drawn = np.random.default_rng(0), min(num_tokens, _MOST_TOKENS)
    block_experts = -(-num_experts // num_blocks)
    loads = np.zeros((_NUM_DRAWS, 2))
    for draw in range(_NUM_DRAWS):
        scores = rng.random((num_drawn, num_experts), np.float32)
        chosen = np.argpartition(scores, num_chosen - 1, axis=1)[:, :num_chosen].ravel()
        counts = np.bincount(chosen, minlength=num_blocks * block_experts).reshape(num_blocks, block_experts)
        loads[draw] = np.count_nonzero(counts, axis=1).max(), counts.sum(axis=1).max()
    read, choices = loads.mean(axis=0)
    return ExpertLoad(float(read), float(choices) * num_tokens / num_drawn)
