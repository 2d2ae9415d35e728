"""Computes the minimum time of steps from what they must read and compute, and the data sheet of the device.

A decode step reads every weight once, except an untied embedding, and each request's keys and values. The times assume
perfect overlap, and no cost of kernels, launches and the host. The time of all-reduces is estimated separately and is
not part of the roofline: some microseconds for each of two all-reduces per layer and one for the embedding, and the
transfer of the bytes over the links.
"""

import dataclasses

import jax.numpy as jnp

from meshserve.sharding.chips import Chip
from meshserve.sharding.layout import ShardLayout

from ..api.model_config import ModelConfig
from .memory_plan import layer_bytes

# Time of an all-reduce of few bytes within a host, measured on four H200 (docs/performance.md) and guessed for TPUs.
_XLA_ALL_REDUCE_SECONDS = {"gpu": 18e-6, "tpu": 10e-6}
_P2P_ALL_REDUCE_SECONDS = 4e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roof:
    """The roofline of a decode step, or of the prefill of a prompt, on all devices of a mesh."""

    num_tokens: int  # decoded tokens, or tokens of the prompt
    context: int  # tokens of each request in the cache
    seconds: float
    all_reduce_seconds: float  # estimated
    bound: str  # "memory" or "compute"

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.all_reduce_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The roofline of a model at a TP size on a kind of device."""

    model: ModelConfig
    layout: ShardLayout
    dtype: jnp.dtype
    chip: Chip
    has_p2p: bool = False  # whether the devices use the P2P all-reduce

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that each device reads in a step."""
        head = self.layout.vocab_size // self.layout.num_shards * self.model.embed_dim * self.dtype.itemsize
        return layer_bytes(self.model, self.layout, self.dtype) + head

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values on each device."""
        groups = self.layout.num_groups // self.layout.num_shards
        return self.model.num_layers * groups * 2 * self.model.head_dim * self.dtype.itemsize

    def decode(self, batch: int, context: int) -> Roof:
        """Returns the roofline of a decode step of `batch` requests with `context` tokens each."""
        read_bytes = self.weight_bytes + batch * context * self.token_bytes
        flops = batch * (2 * self.weight_bytes / self.dtype.itemsize + context * self._attention_flops)
        return self._roof(batch, context, read_bytes, flops, num_steps=1)

    def prefill(self, num_tokens: int, step_tokens: int) -> Roof:
        """Returns the roofline of the prefill of one prompt, with `step_tokens` tokens per step.

        Each chunk reads the weights and the keys and values of the chunks before it. The last layer's MLP is computed
        for the last token only.
        """
        num_steps = -(-num_tokens // step_tokens)
        read_bytes = num_steps * self.weight_bytes + num_steps * num_tokens // 2 * self.token_bytes
        layers = layer_bytes(self.model, self.layout, self.dtype) / self.dtype.itemsize
        last_mlp = 3 * self.model.embed_dim * self.layout.mlp_dim // self.layout.num_shards
        flops = num_tokens * (2 * (layers - last_mlp) + num_tokens / 2 * self._attention_flops)
        return self._roof(num_tokens, num_tokens, read_bytes, flops, num_steps=num_steps)

    @property
    def _attention_flops(self) -> float:
        """Operations per device for each pair of tokens: scores and weighted values."""
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
        num_all_reduces = 2 * self.model.num_layers + 1
        sent_bytes = 2 * (num_shards - 1) / num_shards * num_tokens * self.model.embed_dim * self.dtype.itemsize
        seconds = _P2P_ALL_REDUCE_SECONDS if self.has_p2p else _XLA_ALL_REDUCE_SECONDS[self.chip.platform]
        return num_all_reduces * (num_steps * seconds + sent_bytes / self.chip.link_bytes_per_second)
