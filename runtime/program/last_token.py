"""Computes the result of a pooling step on the devices. Step 7 of 10, in place of the sampler.

In: hidden states of the last token of each prompt. Out: embeddings, or the logits of two tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

from meshserve.kernels.linear import rms_norm, xla
from meshserve.sharding.mesh import TENSOR_AXIS

from ..model.layers.decoder import Decoder


def pooled(model: Decoder, x: jax.Array) -> jax.Array:
    """Returns the results of a model with `ModelConfig.pooling`, written per shard.

    Args:
      model: This shard's part of the model.
      x: [B, D] hidden states after all layers, the same on every shard.

    Returns:
      [B, N] float32, the same on every shard: the hidden states after the final norm, which are not normalised to unit
      length, or the logits of the two tokens that a reranker compares. The others of the vocabulary are not computed.
    """
    config, pooling = model.config, model.config.pooling
    assert pooling is not None, "a model that generates tokens has no pooling steps"
    x = rms_norm(x, model.norm[...], config.rms_norm_eps)
    if pooling.score_token_ids is None:
        return x.astype(jnp.float32)
    table: Any = model.embedding[...] if config.is_tied else model.head[...]  # not quantized; see `model_task`
    return xla.linear(x, _rows(table, pooling.score_token_ids), out_dtype=jnp.dtype("float32"))


def _rows(table: jax.Array, token_ids: tuple[int, ...]) -> jax.Array:
    """Returns the rows [N, D] of some tokens of a table that is sharded by vocabulary, [V / shards, D] here."""
    num_rows = table.shape[0]
    local = jnp.array(token_ids) - jax.lax.axis_index(TENSOR_AXIS) * num_rows
    is_here = (local >= 0) & (local < num_rows)
    rows = table[jnp.clip(local, 0, num_rows - 1)]
    return jax.lax.psum(jnp.where(is_here[:, None], rows, 0), TENSOR_AXIS)
