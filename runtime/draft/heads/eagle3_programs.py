"""The programs of an EAGLE-3 head: what steps of the served model do for it, and the chain that proposes draft tokens.

Serves step 6 of 10. Everything is written per shard.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.mesh import named_sharding, partition_spec

from ...api.sampling_params import SamplingMode
from ...backend.kernels import Kernels
from ...program.batch import ANY_MODE, Bucket
from ...program.sampling import SamplingBatch, sample
from ...program.step import CacheShape
from .eagle3 import STATE_AXES, Eagle3, HeadState, before
from .eagle3_config import Eagle3Config
from .head_programs import Head


@dataclass(frozen=True, kw_only=True)
class Eagle3Head(Head):
    """An EAGLE-3 head on a mesh. It keeps a `HeadState`."""

    config: Eagle3Config

    @property
    def layers_read(self) -> tuple[int, ...]:
        return self.config.layers_read

    @property
    def state_specs(self) -> HeadState[PartitionSpec]:
        return HeadState(partition_spec(STATE_AXES.cache), partition_spec(STATE_AXES.features))

    def state_shapes(self, shape: CacheShape) -> HeadState[jax.ShapeDtypeStruct]:
        """Returns what the head keeps in a cache of this shape, as shapes with shardings."""
        layer = self.config.layer
        cache = (1, shape.num_pages, self.layout.num_groups, 2, shape.page_size, layer.head_dim)
        features = (shape.num_pages, shape.page_size, layer.embed_dim)
        cache_sharding, features_sharding = (named_sharding(self.mesh, axes) for axes in STATE_AXES)
        return HeadState(
            jax.ShapeDtypeStruct(cache, self.dtype, sharding=cache_sharding),
            jax.ShapeDtypeStruct(features, self.dtype, sharding=features_sharding),
        )

    def keep(
        self,
        model: Eagle3,
        state: HeadState[jax.Array],
        captured: list[jax.Array],
        token_ids: jax.Array,
        batch: PagedBatch,
    ) -> HeadState[jax.Array]:
        return model.keep(state, captured, token_ids, batch, self.kernels)

    def propose(
        self, model: Eagle3, bucket: Bucket, state: HeadState[jax.Array], page_table: jax.Array, packed: jax.Array
    ) -> tuple[HeadState[jax.Array], jax.Array]:
        return propose(model, self.kernels, bucket, state, page_table, packed)


def propose(
    model: Eagle3,
    kernels: Kernels,
    bucket: Bucket,
    state: HeadState[jax.Array],
    page_table: jax.Array,
    packed: jax.Array,
) -> tuple[HeadState[jax.Array], jax.Array]:
    """Proposes draft tokens: the first after each request's last token, each further one after the one before.

    Returns:
      The state, and the tokens [bucket.num_steps, B] int32; those of steps that a request does not need mean nothing.
    """
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    page_table = page_table.at[fields["page_slot"], fields["page_index"]].set(fields["page"], mode="drop")
    last = PagedBatch(fields["positions"], fields["token_request"], page_table[fields["slots"]])
    first = before(last)
    sampling = SamplingBatch.unpacked(fields)
    mode = fields["mode"][0] if bucket.mode == ANY_MODE else SamplingMode(bucket.mode)

    def one_step(
        index: int | jax.Array, carry: tuple[HeadState[jax.Array], jax.Array, jax.Array, jax.Array]
    ) -> tuple[HeadState[jax.Array], jax.Array, jax.Array, jax.Array]:
        state, token_ids, feature, proposed = carry
        is_active = (index < fields["num_steps"]) & (first.positions >= 0)
        batch = first._replace(positions=jnp.where(is_active, first.positions + index, -1))
        state, feature = model.draft(state, token_ids, feature, batch, kernels)
        token_ids = sample(
            model.logits(feature, kernels),
            sampling._replace(position=sampling.position + index),
            mode,
            vocab_size=model.config.served_vocab_size,
            is_unrolled=kernels.is_unrolled,
            exchange=kernels.exchange,
            find_threshold=kernels.find_threshold,
            token_ids=model.token_ids[...],
        )
        return state, token_ids, feature, proposed.at[index].set(token_ids)

    proposed = jnp.zeros((bucket.num_steps, bucket.num_requests), jnp.int32)
    carry = (state, fields["token_ids"], model.feature_at(state, first), proposed)
    if kernels.is_unrolled:
        for index in range(bucket.num_steps):
            carry = one_step(index, carry)
    else:
        carry = jax.lax.fori_loop(0, bucket.num_steps, one_step, carry)
    return carry[0], carry[3]
