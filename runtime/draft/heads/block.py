"""A block drafter of the DFlash kind as a flax.nnx module, written per shard.

It drafts a whole block of tokens in one pass. Its layers are those of Qwen3 with another attention: the block, which is
the last known token and a mask token for each draft token, attends to itself in both directions, and to the *features*
of all positions before it, several hidden states of the served model merged by `fc` and a norm. Every layer makes keys
and values of the same features, so steps of the served model compute just these (`keep`), and no layer need run to do
so. The output at a mask gives the token in its place.

Dimensions: as in `model`; V is the drafter's vocabulary, B requests with N tokens of a block each.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.linear import RMSNorm, rms_norm
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.layout import ShardLayout, split_group
from meshserve.sharding.mesh import TENSOR_AXIS

from ...backend.kernels import Kernels
from ...backend.step_context import MLPContext
from ...model.declaration import Declare
from ...model.layers.decoder import DecoderLayer
from ...model.layers.embedding import embed
from ...model.layers.residual import add_product
from ...model.layers.rope import rotate, rotation
from ...model.layers.stack import layer_of
from .block_config import BlockConfig

STATE_AXES = (None, None, "kv_heads", None, None, None)  # the stored keys and values, [L, P, K, 2, S, H]


class Block(NamedTuple):
    """The blocks of a dispatch."""

    positions: jax.Array  # [B, N] int32, of the last known token and of each draft token; -1 for padding
    context: PagedBatch  # B * N requests of one token each, at the position before its block; -1 if there is none


class BlockDrafter(nnx.Module):
    """The drafter. Its embedding is the served model's, and so is its head unless it has a vocabulary of its own."""

    def __init__(self, config: BlockConfig, layout: ShardLayout, dtype: jnp.dtype, *, embedding_rows: int):
        declare, layer = Declare(dtype=dtype, num_shards=layout.num_shards), config.layer
        embed_dim = layer.embed_dim
        self.embedding = declare((embedding_rows, embed_dim), ("vocab", None))
        self.fc = declare((embed_dim, len(config.layers_read) * embed_dim), ("features", None))
        self.feature_norm = declare((embed_dim,), (None,))
        self.layers = DecoderLayer(layer, layout, replace(declare, prefix="layers.", stack=(layer.num_layers,)))
        self.norm = declare((embed_dim,), (None,))
        self.head = declare((layout.vocab_size, embed_dim), ("vocab", None))
        self.token_ids = declare((layout.vocab_size,), ("vocab",), jnp.dtype("int32"))  # ids in the served vocabulary
        self.config = config

    def keep(self, cache: jax.Array, captured: list[jax.Array], batch: PagedBatch, kernels: Kernels) -> jax.Array:
        """Returns the cache with the keys and values of a step's tokens; see `drafting.head_contract.Follow`."""
        layer, num_tokens = self.config.layer, len(batch.positions)
        local = kernels.linear(jnp.concatenate(captured, axis=1).astype(self.fc.dtype), self.fc[...])
        merged = jax.lax.all_gather(local, TENSOR_AXIS, axis=1, tiled=True)
        features = rms_norm(merged, self.feature_norm[...], layer.rms_norm_eps)
        angles = rotation(layer.rope, layer.head_dim, batch.positions)
        for index in range(layer.num_layers):
            attention = self._layer(index).attention
            qkv = attention.qkv[...]
            assert isinstance(qkv, jax.Array)
            kv = qkv[:, -2 * layer.head_dim :]
            rows = kernels.linear(features, kv).reshape(num_tokens, kv.shape[0], 2, layer.head_dim)
            k = rotate(rms_norm(rows[:, :, 0], attention.k_norm[...], layer.rms_norm_eps), *angles)
            cache = kernels.write(cache, k, rows[:, :, 1], batch, layer=index)
        return cache

    def draft(self, cache: jax.Array, token_ids: jax.Array, block: Block, kernels: Kernels) -> jax.Array:
        """Runs all layers on blocks.

        Args:
          cache: The keys and values of the features of all positions before the blocks.
          token_ids: [B, N] int32, the last known token of each request, and masks.
          block: Their places.
          kernels: The kernels of the layers.

        Returns:
          The hidden states [B * N, D].
        """
        config, reduce = self.config.layer, kernels.p2p_all_reduce
        x = embed(self.embedding[...], token_ids.reshape(-1), reduce).astype(self.fc.dtype)
        angles = rotation(config.rope, config.head_dim, block.positions.reshape(-1))
        for index in range(config.num_layers):
            layer = self._layer(index)
            attention, norm = layer.attention, RMSNorm(layer.attention_norm[...], config.rms_norm_eps)
            rows = kernels.linear(x, attention.qkv[...], prologue=norm)
            q, k, v = split_group(rows.reshape(len(x), attention.qkv.shape[0], -1, config.head_dim))
            q = rotate(rms_norm(q, attention.q_norm[...], config.rms_norm_eps), *angles)
            k = rotate(rms_norm(k, attention.k_norm[...], config.rms_norm_eps), *angles)
            attended = attend(q, k, v, cache, block, kernels, layer=index).reshape(len(x), -1)
            x = add_product(x, partial(kernels.linear, attended, attention.out[...]), reduce)
            x = layer.after_mlp(x, index, MLPContext(reduce, products=kernels.products))
        return x

    def logits(self, x: jax.Array, kernels: Kernels) -> jax.Array:
        """Computes float32 logits [T, V / shards] of this shard's part of the drafter's vocabulary."""
        x = rms_norm(x, self.norm[...], self.config.layer.rms_norm_eps)
        return kernels.head(x, self.head[...], out_dtype=jnp.dtype("float32"))

    def _layer(self, index: int) -> DecoderLayer:
        return layer_of(self.layers, index)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, block: Block, kernels: Kernels, *, layer: int
) -> jax.Array:
    """Computes attention of blocks to themselves, in both directions, and to all positions before them.

    The two parts are merged by their sums of exponentials, so that a block's keys are stored nowhere.

    Args:
      q: [B * N, K, G, H].
      k, v: [B * N, K, H], of the blocks.
      cache: [L, P, K, 2, S, H].
      block: Where they are.
      kernels: Has `attend_part`.
      layer: Index in the cache.

    Returns:
      [B * N, K, G, H] in q's dtype; 0 for padding.
    """
    assert kernels.attend_part is not None, "every backend has it"
    shape, scale = block.positions.shape, q.shape[-1] ** -0.5
    before, sums = kernels.attend_part(q, cache, block.context, layer=layer, scale=scale)
    sums = jnp.where(block.context.positions[:, None, None] < 0, -jnp.inf, sums)
    queries, keys, values = (array.astype(jnp.float32).reshape(*shape, *array.shape[1:]) for array in (q, k, v))
    scores = jnp.einsum("bnkgh,bmkh->bnkgm", queries, keys, precision="highest") * scale
    scores = jnp.where((block.positions >= 0)[:, None, None, None, :], scores, -jnp.inf)
    scores = scores.reshape(*q.shape[:-1], shape[1])
    highest = jnp.maximum(scores.max(axis=-1), sums)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights, of_context = jnp.exp(scores - highest[..., None]), jnp.exp(sums - highest)
    own = jnp.einsum(
        "bnkgm,bmkh->bnkgh", weights.reshape(*shape, *weights.shape[1:]), values, precision="highest"
    ).reshape(q.shape)
    total = jnp.maximum(weights.sum(axis=-1) + of_context, 1e-30)
    merged = (own + of_context[..., None] * jnp.where(of_context[..., None] > 0, before, 0)) / total[..., None]
    return jnp.where(block.positions.reshape(-1)[:, None, None, None] < 0, 0, merged).astype(q.dtype)
