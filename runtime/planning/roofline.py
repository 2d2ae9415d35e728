"""Computes the minimum time of steps from what they must read and compute, and the data sheet of the device.

A decode step reads every weight once, except an untied embedding and experts that no token chose, and each request's
keys and values. The times assume perfect overlap, and no cost of kernels, launches and the host. The time of
all-reduces is estimated separately and added: some microseconds for each of two all-reduces per layer and one for the
embedding, and the transfer of the bytes over the links.

Tokens choose experts uniformly and independently. If experts are split by tensor, each device reads its slice of all
those chosen. If they are split by expert, the devices differ, and the busiest one decides how long the step takes.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meshserve.sharding.chips import Chip
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ExpertsConfig, ModelConfig
from .memory_plan import layer_bytes, num_layer_weights

# Time of an all-reduce of few bytes within a host, measured on four H200 (docs/performance.md) and guessed for TPUs.
_XLA_ALL_REDUCE_SECONDS = {"gpu": 18e-6, "tpu": 10e-6}
_P2P_ALL_REDUCE_SECONDS = 4e-6
# What prompts of 1,024 to 131,000 tokens reached on Hopper GPUs: within 10 % of their first tokens (docs/plan.md).
_PREFILL_SHARE, _ATTENTION_SHARE = 0.64, 0.48  # of the peak
_RESTORED_BYTES_PER_SECOND = 42e9  # from host memory to a first token, on an H100 (docs/log/scheduler.md)
_NUM_DRAWS = 32  # of choices of experts, to find the load of the busiest device
_MOST_TOKENS = 1024  # drawn; beyond that, every expert is read and the devices differ little


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roof:
    """The roofline of a decode step, or of the prefill of a prompt, on all devices of a mesh."""

    num_tokens: int  # decoded tokens, or tokens of the prompt
    context: int  # tokens of each request in the cache
    seconds: float  # without the all-reduces
    all_reduce_seconds: float  # estimated
    bound: str  # "memory" or "compute"

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total_seconds

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.all_reduce_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstToken:
    """The predicted time of a lone prompt to its first token."""

    num_tokens: int
    computed_seconds: float
    restored_seconds: float  # if its prefix comes from host memory instead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The roofline of a model at a TP size on a kind of device."""

    model: ModelConfig
    layout: ShardLayout
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    chip: Chip
    has_p2p: bool = False  # whether the devices use the P2P all-reduce

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that each device reads in a step, if it reads all of its experts."""
        return self._layer_bytes + self._head_bytes

    def read_weight_bytes(self, num_tokens: int) -> float:
        """Returns the bytes of weights that the device with the most reads in a step of so many tokens."""
        num_experts, _ = self._expert_load(num_tokens)
        return self._shared_layer_bytes + self._head_bytes + num_experts * self._expert_bytes

    @property
    def _layer_bytes(self) -> int:
        return layer_bytes(self.model, self.layout, self.dtype)

    @property
    def _head_bytes(self) -> int:
        return self._num_head_weights * (self.dtype.itemsize if self.model.head_quantisation is None else 1)

    @property
    def _num_head_weights(self) -> int:
        return self.layout.vocab_size // self.layout.num_shards * self.model.embed_dim

    @property
    def _expert_bytes(self) -> int:
        """The bytes of one expert of a device's block, in all layers that have experts."""
        if self.layout.experts is None:
            return 0
        num_weights = 3 * self.layout.experts.block_mlp_dim * self.model.embed_dim
        return int(len(self.model.stacks["layers"]) * num_weights * self._expert_weight_bytes)

    @property
    def _expert_weight_bytes(self) -> float:
        """The bytes of a weight of the experts, with its share of a scale."""
        quantisation = self.model.layer_quantisation
        if quantisation is None:
            return self.dtype.itemsize
        return 1 + jnp.dtype(quantisation.scale_dtype).itemsize / math.prod(quantisation.block)

    @property
    def _shared_layer_bytes(self) -> int:
        """The bytes of the layers on a device without their experts."""
        held = self.layout.experts.block_experts if self.layout.experts is not None else 0
        return self._layer_bytes - held * self._expert_bytes

    def _expert_load(self, num_tokens: int) -> tuple[float, float]:
        """Returns `expert_load`, or zeros for a model without experts."""
        if self.model.experts is None:
            return 0.0, 0.0
        return expert_load(self.model.experts, self.layout, num_tokens)

    def _layer_flops(self, num_tokens: int) -> float:
        """Returns the operations of the layers' projections in a step, on the device with the most."""
        _, num_choices = self._expert_load(num_tokens)
        held = self.layout.experts.block_experts if self.layout.experts is not None else 0
        num_expert_weights = self._expert_bytes / self._expert_weight_bytes
        num_shared = num_layer_weights(self.model, self.layout) - held * num_expert_weights
        return 2 * (num_tokens * num_shared + num_choices * num_expert_weights)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values on each device, on average."""
        groups = self.layout.num_groups // self.layout.num_shards
        num_bytes = self.model.num_layers * groups * 2 * self.model.head_dim * self.cache_dtype.itemsize
        return num_bytes // self.layout.cp

    def decode(self, batch: int, context: int) -> Roof:
        """Returns the roofline of a decode step of `batch` requests with `context` tokens each."""
        read_bytes = self.read_weight_bytes(batch) + batch * context * self.token_bytes
        head_flops = 2 * self._num_head_weights
        flops = self._layer_flops(batch) + batch * (head_flops + context * self._attention_flops)
        return self._roof(batch, context, read_bytes, flops, num_steps=1)

    def prefill(self, num_tokens: int, step_tokens: int) -> Roof:
        """Returns the roofline of the prefill of one prompt, with `step_tokens` tokens per step.

        Each chunk reads the weights and the keys and values of the chunks before it. The last layer's MLP is computed
        for the last token only.
        """
        num_steps = -(-num_tokens // step_tokens)
        step_tokens = -(-num_tokens // num_steps)
        read_bytes = num_steps * self.read_weight_bytes(step_tokens) + num_steps * num_tokens // 2 * self.token_bytes
        flops = num_steps * self._layer_flops(step_tokens) - self._last_mlp_flops(num_tokens)
        flops += num_tokens * num_tokens / 2 * self._attention_flops
        return self._roof(num_tokens, num_tokens, read_bytes, flops, num_steps=num_steps)

    def first_token(self, num_tokens: int, step_tokens: int) -> FirstToken | None:
        """Predicts when one prompt gets its first token, with `step_tokens` tokens per step, and nothing else running.

        Returns None where nothing was measured that could predict it: on devices other than one Hopper GPU, and for
        quantised models and models with experts.
        """
        is_measured = self.chip.is_hopper and self.layout.num_shards == 1 and self.dtype.itemsize == 2
        if not is_measured or self.model.layer_quantisation is not None or self.model.experts is not None:
            return None
        roof = self.prefill(num_tokens, step_tokens)
        attention_flops = num_tokens * num_tokens / 2 * self._attention_flops
        linear_flops = self._layer_flops(num_tokens) - self._last_mlp_flops(num_tokens)
        seconds = linear_flops / _PREFILL_SHARE + attention_flops / _ATTENTION_SHARE
        return FirstToken(
            num_tokens=num_tokens,
            computed_seconds=max(seconds / self.chip.flops_per_second, roof.total_seconds),
            restored_seconds=num_tokens * self.token_bytes / _RESTORED_BYTES_PER_SECOND
            + self.decode(1, num_tokens).total_seconds,
        )

    def pooling(self, num_tokens: int, step_tokens: int) -> Roof:
        """Returns the roofline of a full step of prompts of `num_tokens` tokens each, as embedding models compute them.

        Longer prompts take several steps: see `prefill`. The output head is not read.
        """
        if num_tokens >= step_tokens:
            return self.prefill(num_tokens, step_tokens)
        num_prompts = step_tokens // num_tokens
        total = num_prompts * num_tokens
        read_bytes = self.read_weight_bytes(total) - self._head_bytes
        flops = self._layer_flops(total) - self._last_mlp_flops(total - num_prompts)
        flops += total * num_tokens / 2 * self._attention_flops
        return self._roof(total, num_tokens, read_bytes, flops, num_steps=1)

    def _last_mlp_flops(self, num_tokens: int) -> float:
        if self.model.experts is not None and self.model.experts.has_experts(self.model.num_layers - 1):
            _, num_choices = self._expert_load(num_tokens)
            num_weights = self._expert_bytes / self._expert_weight_bytes / len(self.model.stacks["layers"])
            return 2 * num_choices * num_weights
        return 2 * num_tokens * (3 * self.model.embed_dim * self.layout.mlp_dim // self.layout.num_shards)

    @property
    def _attention_flops(self) -> float:
        """Operations per device for each pair of tokens: scores and weighted values."""
        return 4 * self.model.num_layers * self.model.num_query_heads * self.model.head_dim / self.layout.num_shards

    def _roof(self, num_tokens: int, context: int, read_bytes: float, flops: float, *, num_steps: int) -> Roof:
        memory, compute = read_bytes / self.chip.hbm_bytes_per_second, flops / self.chip.flops_per_second
        return Roof(
            num_tokens=num_tokens,
            context=context,
            seconds=max(memory, compute),
            all_reduce_seconds=self._all_reduce_seconds(num_tokens, num_steps),
            bound="memory" if memory >= compute else "compute",
        )

    def _all_reduce_seconds(self, num_tokens: int, num_steps: int) -> float:
        num_shards = self.layout.num_shards
        if num_shards == 1:
            return 0.0
        num_all_reduces = 2 * self.model.num_layers + 1
        sent_bytes = 2 * (num_shards - 1) / num_shards * num_tokens * self.model.embed_dim * self.dtype.itemsize
        seconds = _P2P_ALL_REDUCE_SECONDS if self.has_p2p else _XLA_ALL_REDUCE_SECONDS[self.chip.platform]
        all_reduces = num_all_reduces * (num_steps * seconds + sent_bytes / self.chip.link_bytes_per_second)
        return all_reduces + self._exchange_seconds(num_tokens, num_steps)

    def _exchange_seconds(self, num_tokens: int, num_steps: int) -> float:
        """Returns the time in which devices that divide pages gather queries and exchange results, in all layers."""
        if self.layout.cp == 1:
            return 0.0
        heads = self.layout.group_size * (self.layout.cp - 1) * num_tokens
        sent_bytes = heads * (2 * self.model.head_dim * self.dtype.itemsize + 4)
        seconds = 2 * num_steps * _XLA_ALL_REDUCE_SECONDS[self.chip.platform]
        return self.model.num_layers * (seconds + sent_bytes / self.chip.link_bytes_per_second)


class ExpertLoad(NamedTuple):
    """What the busiest device does in one layer, on average."""

    num_experts: float  # of its block, that are read
    num_choices: float  # tokens that go through an expert of its block, counted once per expert


def expert_load(experts: ExpertsConfig, layout: ShardLayout, num_tokens: int) -> ExpertLoad:
    """Returns the load of a step of `num_tokens` tokens."""
    assert layout.experts is not None
    num_blocks = layout.num_shards if layout.experts.is_by_expert else 1
    return _busiest(experts.num_experts, experts.num_chosen, num_blocks, num_tokens)


def num_read_experts(experts: ExpertsConfig, num_tokens: int) -> float:
    """Returns how many different experts the tokens of a step choose on average in each layer."""
    return experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** num_tokens)


def num_read_params(model: ModelConfig, num_tokens: int) -> float:
    """Returns the weights that a step reads on all devices together: those it needs, without an untied embedding."""
    num_read = float(model.num_params - (0 if model.is_tied else model.vocab_size * model.embed_dim))
    if model.experts is not None:
        num_unread = model.experts.num_experts - num_read_experts(model.experts, num_tokens)
        num_read -= len(model.stacks["layers"]) * num_unread * 3 * model.experts.mlp_dim * model.embed_dim
    return num_read


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
