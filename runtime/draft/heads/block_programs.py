"""The programs of a block drafter: what steps of the served model do for it, and the dispatch that proposes a block.

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
from .block import STATE_AXES, Block, BlockDrafter
from .block_config import BlockConfig
from .head_programs import Head


@dataclass(frozen=True, kw_only=True)
class BlockHead(Head):
    """A block drafter on a mesh. It keeps an array, the keys and values of each layer, in the served model's pages."""

    config: BlockConfig

    @property
    def layers_read(self) -> tuple[int, ...]:
        return self.config.layers_read

    @property
    def state_specs(self) -> PartitionSpec:
        return partition_spec(STATE_AXES)

    def state_shapes(self, shape: CacheShape) -> jax.ShapeDtypeStruct:
        """Returns what it keeps in a cache of this shape, as a shape with a sharding."""
        layer = self.config.layer
        cache = (layer.num_layers, shape.num_pages, self.layout.num_groups, 2, shape.page_size, layer.head_dim)
        return jax.ShapeDtypeStruct(cache, self.dtype, sharding=named_sharding(self.mesh, STATE_AXES))

    def keep(
        self, model: BlockDrafter, state: jax.Array, captured: list[jax.Array], token_ids: jax.Array, batch: PagedBatch
    ) -> jax.Array:
        return model.keep(state, captured, batch, self.kernels)

    def propose(
        self, model: BlockDrafter, bucket: Bucket, state: jax.Array, page_table: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return state, propose(model, self.kernels, bucket, state, page_table, packed)


def propose(
    model: BlockDrafter, kernels: Kernels, bucket: Bucket, cache: jax.Array, page_table: jax.Array, packed: jax.Array
) -> jax.Array:
    """Proposes draft tokens in one pass.

    A request's block has as many masks as it is to have draft tokens, so that it may be shorter than the drafter's.

    Returns:
      The tokens [bucket.num_steps, B] int32; those of places that a request does not need mean nothing.
    """
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    num_requests, length = bucket.num_requests, 1 + bucket.num_steps
    page_table = page_table.at[fields["page_slot"], fields["page_index"]].set(fields["page"], mode="drop")
    last, place = fields["positions"][:, None], jnp.arange(length)
    positions = jnp.where((last >= 0) & (place <= fields["num_steps"][:, None]), last + place, -1)
    context = PagedBatch(
        jnp.where(positions < 0, -1, last - 1).reshape(-1),
        jnp.arange(num_requests * length, dtype=jnp.int32),
        jnp.repeat(page_table[fields["slots"]], length, axis=0),
    )
    token_ids = jnp.where(place == 0, fields["token_ids"][:, None], model.config.mask_token_id)
    x = model.draft(cache, token_ids, Block(positions, context), kernels)
    masks = x.reshape(num_requests, length, -1)[:, 1:].reshape(num_requests * bucket.num_steps, -1)
    sampling = SamplingBatch.unpacked(fields)
    sampling = jax.tree.map(lambda each: jnp.repeat(each, bucket.num_steps, axis=0), sampling)
    behind = jnp.tile(jnp.arange(bucket.num_steps, dtype=jnp.int32), num_requests)
    tokens = sample(
        model.logits(masks, kernels),
        sampling._replace(position=sampling.position + behind),
        fields["mode"][0] if bucket.mode == ANY_MODE else SamplingMode(bucket.mode),
        vocab_size=model.config.served_vocab_size,
        is_unrolled=kernels.is_unrolled,
        exchange=kernels.exchange,
        find_threshold=kernels.find_threshold,
        token_ids=model.token_ids[...],
    )
    return tokens.reshape(num_requests, bucket.num_steps).T
