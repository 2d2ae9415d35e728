"""The programs of a head: what the steps of the served model do for it, and the dispatch that proposes draft tokens.

Serves step 6 of 10. Everything is written per shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import named_sharding, partition_spec

from ..api.sampling_params import SamplingMode
from ..model.qwen3 import Kernels, specs_of
from ..program.batch import ANY_MODE, Bucket
from ..program.sampling import SamplingBatch, sample
from ..program.step import CacheShape
from .eagle3 import STATE_AXES, Eagle3, HeadState, before
from .eagle3_config import Eagle3Config


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head on a mesh. Implements `drafting.head_contract.Follower`."""

    config: Eagle3Config
    layout: ShardLayout
    dtype: jnp.dtype
    mesh: Mesh
    kernels: Kernels
    structure: nnx.GraphDef
    params: nnx.State  # arrays, or shapes with shardings

    @cached_property
    def weights(self) -> tuple[Any, ...]:
        """The parameters in the order in which programs take them."""
        return tuple(jax.tree.leaves(self.params))

    @property
    def weight_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(jax.tree.leaves(specs_of(self.params)))

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

    def bound(self, weights: tuple[jax.Array, ...]) -> "BoundHead":
        params = jax.tree.unflatten(jax.tree.structure(self.params), weights)
        return BoundHead(self.config.layers_read, nnx.merge(self.structure, params), self.kernels)

    def lower_chain(
        self, bucket: Bucket, state: HeadState[jax.ShapeDtypeStruct], page_table: jax.ShapeDtypeStruct | jax.Array
    ) -> jax.stages.Lowered:
        """Lowers the dispatch of a bucket that proposes draft tokens.

        The program is (weights, state, page table, packed) -> (state, tokens [bucket.num_steps, B]). It consumes the
        state.
        """

        def shard_chain(
            weights: tuple[jax.Array, ...], state: HeadState[jax.Array], page_table: jax.Array, packed: jax.Array
        ) -> tuple[HeadState[jax.Array], jax.Array]:
            return propose(self.bound(weights), bucket, state, page_table, packed)

        program = jax.shard_map(
            shard_chain,
            mesh=self.mesh,
            in_specs=(self.weight_specs, self.state_specs, PartitionSpec(), PartitionSpec()),
            out_specs=(self.state_specs, PartitionSpec()),
            check_vma=False,  # as in `program.step`
        )
        packed = jax.ShapeDtypeStruct((bucket.size,), jnp.int32, sharding=named_sharding(self.mesh, ()))
        options = compiler_options(self.mesh, has_library_gemms=False)
        jitted = jax.jit(program, donate_argnums=1, compiler_options=options)
        return jitted.lower(self.weights, state, page_table, packed)


@dataclass(frozen=True)
class BoundHead:
    """A head with this shard's weights. Implements `drafting.head_contract.Follow`."""

    layers: tuple[int, ...]
    model: Eagle3
    kernels: Kernels

    def __call__(
        self, state: HeadState[jax.Array], captured: list[jax.Array], token_ids: jax.Array, batch: PagedBatch
    ) -> HeadState[jax.Array]:
        return self.model.keep(state, captured, token_ids, batch, self.kernels)


def propose(
    head: BoundHead, bucket: Bucket, state: HeadState[jax.Array], page_table: jax.Array, packed: jax.Array
) -> tuple[HeadState[jax.Array], jax.Array]:
    """Proposes draft tokens: the first after each request's last token, each further one after the one before.

    Returns:
      The state, and the tokens [bucket.num_steps, B] int32; those of steps that a request does not need mean nothing.
    """
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    model, kernels = head.model, head.kernels
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


def chain_buckets(buckets: Sequence[Bucket], num_steps: int) -> tuple[Bucket, ...]:
    """Returns the shapes of the dispatches that propose `num_steps` draft tokens, given those of the served model."""
    decodes = [bucket for bucket in buckets if bucket.is_decode and bucket.num_steps == 1]
    sizes = {bucket.num_requests for bucket in buckets}
    fused = {(bucket.num_requests, bucket.mode) for bucket in decodes}
    others = {(size, ANY_MODE) for size in sizes - {size for size, _ in fused}}
    return tuple(
        Bucket(size, size, size, num_steps, is_decode=True, mode=mode) for size, mode in sorted(fused | others)
    )


def to_lower(
    head: Head, buckets: Sequence[Bucket], shape: CacheShape, page_table: jax.ShapeDtypeStruct | jax.Array
) -> Mapping[Bucket, Callable[[], jax.stages.Lowered]]:
    """Returns how to lower the dispatches of these shapes."""
    state = head.state_shapes(shape)
    return {bucket: partial(head.lower_chain, bucket, state, page_table) for bucket in buckets}
