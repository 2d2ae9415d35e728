"""The decoder of a language model: its layers, and what is before and after them. Model classes derive from these.

Called inside `shard_map`, every module sees its shard's block of each parameter and performs its own communication: one
`all_reduce` after the attention output, one after the MLP, one for the embedding. Outside `shard_map`, the same modules
are built abstractly (`registry.abstract_model`) and declare each parameter once, with its global shape and logical
axes.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.linear import RMSNorm, rms_norm, xla
from meshserve.kernels.paged_attention import PagedBatch, RopeSettings
from meshserve.sharding.collectives import P2PAllReduce
from meshserve.sharding.layout import ShardLayout

from ...backend.kernels import Kernels
from ...backend.products import Products
from ...backend.step_context import MLPContext, StepContext, step_context
from ...model_files.model_config import ModelConfig
from ..declaration import Declare
from .attention import Attention
from .embedding import embed
from .mlp import MLP
from .rope import rotation
from .stack import layer_of


class DecoderLayer(nnx.Module):
    """One decoder layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        self.attention_norm = declare((config.embed_dim,), (None,))
        self.attention = Attention(config, layout, declare)
        self.mlp_norm = declare((config.embed_dim,), (None,))
        self.declare_mlp(config, layout, declare)
        self.eps = config.rms_norm_eps

    def declare_mlp(self, config: ModelConfig, layout: ShardLayout, declare: Declare) -> None:
        """Creates the parameters that `after_mlp` uses beside its norm's."""
        self.mlp = MLP(config, layout, declare)

    def __call__(
        self, x: jax.Array, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        x, cache = self.after_attention(x, cache, layer, context)
        return self.after_mlp(x, layer, context.mlp), cache

    def after_attention(
        self, x: jax.Array, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies the attention half, in which tokens interact: x [T, D] and the cache -> the same shapes."""
        return self.attention(x, RMSNorm(self.attention_norm[...], self.eps), cache, layer, context)

    def after_mlp(self, x: jax.Array, layer: int | jax.Array, context: MLPContext) -> jax.Array:
        """Applies the MLP half, in which tokens are independent: x [B, D] -> the same shape."""
        return self.mlp(x, RMSNorm(self.mlp_norm[...], self.eps), layer, context)


class Decoder(nnx.Module):
    """A whole model. Each of `ModelConfig.stacks` holds the stacked parameters of its layers.

    How the layers of a step are run is not decided here: see `model.strategies`.
    """

    layer_types: dict[str, type[DecoderLayer]] = {"layers": DecoderLayer}  # by the name of the stack

    def __init__(self, config: ModelConfig, layout: ShardLayout, dtype: jnp.dtype):
        declare = Declare(dtype=dtype, num_shards=layout.num_shards, quantization=config.quantization)
        table = (layout.vocab_size, config.embed_dim)
        self.embedding = declare(table, ("vocab", None))
        for name, layers in config.stacks.items():
            stacked = replace(declare, prefix=f"{name}.", stack=(len(layers),))
            setattr(self, name, self.layer_types[name](config, layout, stacked))
        self.norm = declare((config.embed_dim,), (None,))
        if config.has_head:
            self.head = replace(declare, quantization=config.head_quantization).matrix("head", table, ("vocab", None))
        self.config, self.cp = config, layout.cp

    def embed(self, token_ids: jax.Array, p2p_all_reduce: P2PAllReduce | None = None) -> jax.Array:
        """Embeds ids [T] as [T, D]."""
        return embed(self.embedding[...], token_ids, p2p_all_reduce)

    def layer(self, index: int | jax.Array) -> DecoderLayer:
        """Returns one decoder layer. Only models with a single stack have layers of a traced index."""
        stack = "layers"
        if isinstance(index, int):
            stack = next(name for name, layers in self.config.stacks.items() if index in layers)
            index = self.config.stacks[stack].index(index)
        return layer_of(getattr(self, stack), index)

    def after_last_mlp(self, hidden: jax.Array, context: MLPContext) -> jax.Array:
        """Applies the last layer's MLP to hidden states [B, D] as in `Forward.hidden`."""
        last = self.config.num_layers - 1
        return self.layer(last).after_mlp(hidden, last, context)

    def logits(self, x: jax.Array, linear: Callable[..., jax.Array] = xla.linear) -> jax.Array:
        """Computes float32 logits [B, V / shards] of this shard's vocabulary from hidden states [B, D]."""
        x = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        table = self.head[...] if self.config.has_head else self.embedding[...]
        return linear(x, table, out_dtype=jnp.dtype("float32"))

    def context(
        self, kernels: Kernels, batch: PagedBatch, products: Products, *, has_single_tokens: bool = False
    ) -> StepContext:
        """Returns what the layers of a step share if they are not fused; see `step_context`."""
        cos, sin = rotation(self.config.rope, self.config.head_dim, batch.positions)
        attention = self.layers.attention
        rope = RopeSettings(attention.q_norm[...], attention.k_norm[...], cos, sin, self.config.rms_norm_eps)
        return step_context(kernels, batch, rope, products, cp=self.cp, has_single_tokens=has_single_tokens)
