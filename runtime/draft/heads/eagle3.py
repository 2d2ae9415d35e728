"""An EAGLE-3 head as a flax.nnx module, written per shard.

It drafts the token after next. At position q it reads the *feature* of position q, three hidden states of the served
model merged by `fc`, and the embedding of the token at q + 1. Its single decoder layer attends to its earlier
positions, and its output gives the token at q + 2 in a vocabulary of its own. Where the served model has not been, the
head's own output stands for the feature of the next position.

Keys and values depend on these inputs alone, not on the layer's output. Steps of the served model therefore compute
just these (`keep`), and only a chain of draft tokens runs the whole layer (`draft`).

Dimensions: as in `model`; V is the head's vocabulary.
"""

from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.linear import RMSNorm, rms_norm
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import TENSOR_AXIS

from ...backend.kernels import Kernels
from ...backend.step_context import MLPContext
from ...model.declaration import Declare
from ...model.layers.embedding import embed
from ...model.layers.mlp import MLP
from ...model.layers.residual import add_product
from ...model.layers.rope import rotate, rotation
from .eagle3_config import NUM_LAYERS_READ, Eagle3Config

Leaf = TypeVar("Leaf")


class HeadState(NamedTuple, Generic[Leaf]):
    """What the head keeps of each position, in the pages of the served model.

    The leaves are arrays, or their shapes or shardings.
    """

    cache: Leaf  # [1, P, K, 2, S, H], sharded by KV head
    features: Leaf  # [P, S, D], sharded by the last dimension


STATE_AXES: HeadState[tuple[str | None, ...]] = HeadState(
    (None, None, "kv_heads", None, None, None), (None, None, "features")
)


class Eagle3(nnx.Module):
    """The head. The embedding is declared only if the head has one of its own; else it is the served model's."""

    def __init__(self, config: Eagle3Config, layout: ShardLayout, dtype: jnp.dtype, *, embedding_rows: int):
        declare, layer = Declare(dtype=dtype, num_shards=layout.num_shards), config.layer
        embed_dim, head_dim, num_groups = layer.embed_dim, layer.head_dim, layout.num_groups
        self.embedding = declare((embedding_rows, embed_dim), ("vocab", None))
        self.fc = declare((embed_dim, NUM_LAYERS_READ * embed_dim), ("features", None))
        self.token_norm = declare((embed_dim,), (None,))
        self.feature_norm = declare((embed_dim,), (None,))
        self.q = declare((num_groups, layout.group_size * head_dim, 2 * embed_dim), ("kv_heads", None, None))
        self.kv = declare((num_groups, 2 * head_dim, 2 * embed_dim), ("kv_heads", None, None))
        self.out = declare((embed_dim, layer.num_query_heads * head_dim), (None, "query_heads"))
        self.mlp_norm = declare((embed_dim,), (None,))
        self.mlp = MLP(layer, layout, declare)
        self.norm = declare((embed_dim,), (None,))
        self.head = declare((layout.vocab_size, embed_dim), ("vocab", None))
        self.token_ids = declare((layout.vocab_size,), ("vocab",), jnp.dtype("int32"))  # ids in the served vocabulary
        self.config = config

    def keep(
        self,
        state: HeadState[jax.Array],
        captured: list[jax.Array],
        token_ids: jax.Array,
        batch: PagedBatch,
        kernels: Kernels,
    ) -> HeadState[jax.Array]:
        """Returns the state with a step's tokens; see `drafting.head_contract.Follow`.

        The features of the tokens are stored, and keys and values of the positions before them, which these complete.
        """
        features = kernels.linear(jnp.concatenate(captured, axis=1).astype(self.fc.dtype), self.fc[...])
        state = state._replace(features=_write(state.features, features, batch))
        earlier = before(batch)
        x = self._inputs(token_ids, self.feature_at(state, earlier), kernels)[0]
        k, v = self._keys_and_values(x, earlier, kernels)
        return state._replace(cache=kernels.write(state.cache, k, v, earlier, layer=0))

    def feature_at(self, state: HeadState[jax.Array], batch: PagedBatch) -> jax.Array:
        """Returns the stored features [T, D] of the positions of a batch."""
        page, offset = _places(state.features, batch)
        local = state.features.at[page, offset].get(mode="clip")
        return jax.lax.all_gather(local, TENSOR_AXIS, axis=1, tiled=True)

    def draft(
        self, state: HeadState[jax.Array], token_ids: jax.Array, feature: jax.Array, batch: PagedBatch, kernels: Kernels
    ) -> tuple[HeadState[jax.Array], jax.Array]:
        """Runs the layer at one position of each request.

        Args:
          state: What the head keeps.
          token_ids: [B] int32, the tokens after these positions.
          feature: [B, D], of these positions.
          batch: The positions.
          kernels: The kernels of the layer.

        Returns:
          The state with these positions, and the layer's output [B, D]: the feature of the next position.
        """
        layer, num_tokens = self.config.layer, len(token_ids)
        x, residual = self._inputs(token_ids, feature, kernels)
        k, v = self._keys_and_values(x, batch, kernels)
        q = kernels.linear(x, self.q[...]).reshape(num_tokens, self.q.shape[0], -1, layer.head_dim)
        q = rotate(q, *rotation(layer.rope, layer.head_dim, batch.positions))
        cache = kernels.write(state.cache, k, v, batch, layer=0)
        attended = kernels.attend(q, cache, batch, layer=0, scale=layer.head_dim**-0.5).reshape(num_tokens, -1)
        product = partial(kernels.linear, attended, self.out[...])
        x = add_product(residual, product, kernels.p2p_all_reduce)
        context = MLPContext(kernels.p2p_all_reduce, products=kernels.products)
        x = self.mlp(x, RMSNorm(self.mlp_norm[...], layer.rms_norm_eps), 0, context)
        return state._replace(cache=cache), x

    def logits(self, x: jax.Array, kernels: Kernels) -> jax.Array:
        """Computes float32 logits [B, V / shards] of this shard's part of the head's vocabulary."""
        x = rms_norm(x, self.norm[...], self.config.layer.rms_norm_eps)
        return kernels.head(x, self.head[...], out_dtype=jnp.dtype("float32"))

    def _inputs(self, token_ids: jax.Array, feature: jax.Array, kernels: Kernels) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's input [T, 2 D], and what its first residual connection adds to, [T, D]."""
        epsilon = self.config.layer.rms_norm_eps
        embedded = embed(self.embedding[...], token_ids, kernels.p2p_all_reduce).astype(feature.dtype)
        normed = rms_norm(feature, self.feature_norm[...], epsilon)
        x = jnp.concatenate([rms_norm(embedded, self.token_norm[...], epsilon), normed], axis=1)
        return x, normed if self.config.is_residual_normed else feature

    def _keys_and_values(self, x: jax.Array, batch: PagedBatch, kernels: Kernels) -> tuple[jax.Array, jax.Array]:
        """Returns keys, rotated, and values: [T, K, H] each."""
        layer = self.config.layer
        rows = kernels.linear(x, self.kv[...]).reshape(x.shape[0], self.kv.shape[0], 2, layer.head_dim)
        k = rotate(rows[:, :, 0], *rotation(layer.rope, layer.head_dim, batch.positions))
        return k, rows[:, :, 1]


def before(batch: PagedBatch) -> PagedBatch:
    """Returns the batch of the positions before those of a batch; there is none before position 0."""
    return batch._replace(positions=jnp.maximum(batch.positions - 1, -1))


def _places(features: jax.Array, batch: PagedBatch) -> tuple[jax.Array, jax.Array]:
    """Returns page and offset of each token; the page of padding does not exist."""
    num_pages, page_size, _ = features.shape
    positions = jnp.maximum(batch.positions, 0)
    page = batch.page_table[batch.token_request, positions // page_size]
    return jnp.where(batch.positions < 0, num_pages, page), positions % page_size


def _write(features: jax.Array, new: jax.Array, batch: PagedBatch) -> jax.Array:
    page, offset = _places(features, batch)
    return features.at[page, offset].set(new.astype(features.dtype), mode="drop")
