"""How fast a server could be: what a step must read and compute, over what the data sheet promises.

A decode step reads every weight but an untied embedding once, and each request's keys and values. That is what the
times here count; nothing overlaps worse than perfectly, and kernels, launches and the host cost nothing. What crosses
the mesh is estimated beside it and not part of the roofline: some microseconds for each of the two sums of a layer and
that of the embedding, and the bytes over the links.
"""

import dataclasses

import jax.numpy as jnp

from meshserve.sharding.chips import Chip
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ModelConfig
from .memory_plan import layer_bytes

# A sum of few bytes within a host: measured on four H200 (docs/performance.md), a guess for TPUs.
_XLA_SUM_SECONDS = {"gpu": 18e-6, "tpu": 10e-6}
_P2P_ALL_REDUCE_SECONDS = 4e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roof:
    """A step, or the prefill of a prompt, on all devices of a mesh."""

    num_tokens: int  # decoded, or of the prompt
    context: int  # tokens in the cache of each request
    seconds: float
    all_reduce_seconds: float  # estimated
    bound: str  # "memory" or "compute"

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def whole_seconds(self) -> float:
        return self.seconds + self.all_reduce_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Of a model at a degree on a kind of device."""

    model: ModelConfig
    layout: ShardLayout
    dtype: jnp.dtype
    chip: Chip
    has_p2p: bool = False  # the devices add up by peers; see `collectives`

    @property
    def weight_bytes(self) -> int:
        """Read in a step by each device."""
        head = self.layout.vocab_size // self.layout.num_shards * self.model.embed_dim * self.dtype.itemsize
        return layer_bytes(self.model, self.layout, self.dtype) + head

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token on each device."""
        groups = self.layout.num_groups // self.layout.num_shards
        return self.model.num_layers * groups * 2 * self.model.head_dim * self.dtype.itemsize

    def decode(self, batch: int, context: int) -> Roof:
        """A step of `batch` requests with so many tokens each."""
        read_bytes = self.weight_bytes + batch * context * self.token_bytes
        flops = batch * (2 * self.weight_bytes / self.dtype.itemsize + context * self._attention_flops)
        return self._roof(batch, context, read_bytes, flops, num_steps=1)

    def prefill(self, num_tokens: int, step_tokens: int) -> Roof:
        """A prompt alone, `step_tokens` a step; each chunk reads the weights and the chunks before it. The last layer's
        MLP is for the last token."""
        num_steps = -(-num_tokens // step_tokens)
        read_bytes = num_steps * self.weight_bytes + num_steps * num_tokens // 2 * self.token_bytes
        layers = layer_bytes(self.model, self.layout, self.dtype) / self.dtype.itemsize
        last_mlp = 3 * self.model.embed_dim * self.layout.mlp_dim // self.layout.num_shards
        flops = num_tokens * (2 * (layers - last_mlp) + num_tokens / 2 * self._attention_flops)
        return self._roof(num_tokens, num_tokens, read_bytes, flops, num_steps=num_steps)

    @property
    def _attention_flops(self) -> float:
        """Of a token for each token that it attends to, on each device: scores and weighted values."""
        return 4 * self.model.num_layers * self.model.num_query_heads * self.model.head_dim / self.layout.num_shards

    def _roof(self, num_tokens: int, context: int, read_bytes: int, flops: float, *, num_steps: int) -> Roof:
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
        num_sums = 2 * self.model.num_layers + 1
        crossing = 2 * (num_shards - 1) / num_shards * num_tokens * self.model.embed_dim * self.dtype.itemsize
        sum_seconds = _P2P_ALL_REDUCE_SECONDS if self.has_p2p else _XLA_SUM_SECONDS[self.chip.platform]
        return num_sums * (num_steps * sum_seconds + crossing / self.chip.link_bytes_per_second)
