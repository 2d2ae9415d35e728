"""The programs of any head: what the steps of the served model do for it, and the dispatch that proposes draft tokens.

Serves step 6 of 10. Everything is written per shard.
"""

import abc
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
from meshserve.sharding.mesh import named_sharding

from ...backend.kernels import Kernels
from ...model.partitioning import specs_of
from ...program.batch import ANY_MODE, Bucket
from ...program.step import CacheShape


@dataclass(frozen=True, kw_only=True)
class Head(abc.ABC):
    """A head on a mesh. Implements `drafting.head_contract.Follower`; each kind of head says what it keeps and how."""

    layout: ShardLayout
    dtype: jnp.dtype
    mesh: Mesh
    kernels: Kernels
    structure: nnx.GraphDef
    params: nnx.State  # arrays, or shapes with shardings

    @property
    @abc.abstractmethod
    def layers_read(self) -> tuple[int, ...]:
        """The layers of the served model, ascending, whose inputs it reads."""

    @property
    @abc.abstractmethod
    def state_specs(self) -> Any:
        """How what it keeps is sharded, as a tree."""

    @abc.abstractmethod
    def state_shapes(self, shape: CacheShape) -> Any:
        """Returns what it keeps in a cache of this shape, as shapes with shardings."""

    @abc.abstractmethod
    def keep(self, model: Any, state: Any, captured: list[jax.Array], token_ids: jax.Array, batch: PagedBatch) -> Any:
        """Returns what it keeps, with a step's tokens; see `drafting.head_contract.Follow`. `model` has the weights."""

    @abc.abstractmethod
    def propose(
        self, model: Any, bucket: Bucket, state: Any, page_table: jax.Array, packed: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns what it keeps, and the draft tokens [bucket.num_steps, B] int32 after each request's last token.

        Those of steps that a request does not need mean nothing.
        """

    @cached_property
    def weights(self) -> tuple[Any, ...]:
        """The parameters in the order in which programs take them."""
        return tuple(jax.tree.leaves(self.params))

    @property
    def weight_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(jax.tree.leaves(specs_of(self.params)))

    def bound(self, weights: tuple[jax.Array, ...]) -> "BoundHead":
        return BoundHead(self, self.model(weights))

    def model(self, weights: tuple[jax.Array, ...]) -> Any:
        """Returns the module with this shard's weights."""
        return nnx.merge(self.structure, jax.tree.unflatten(jax.tree.structure(self.params), weights))

    def lower_chain(
        self, bucket: Bucket, state: Any, page_table: jax.ShapeDtypeStruct | jax.Array
    ) -> jax.stages.Lowered:
        """Lowers the dispatch of a bucket that proposes draft tokens.

        The program is (weights, state, page table, packed) -> (state, tokens [bucket.num_steps, B]). It consumes the
        state.
        """

        def shard_chain(
            weights: tuple[jax.Array, ...], state: Any, page_table: jax.Array, packed: jax.Array
        ) -> tuple[Any, jax.Array]:
            return self.propose(self.model(weights), bucket, state, page_table, packed)

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

    head: Head
    model: Any

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers_read

    def __call__(self, state: Any, captured: list[jax.Array], token_ids: jax.Array, batch: PagedBatch) -> Any:
        return self.head.keep(self.model, state, captured, token_ids, batch)


def chain_buckets(buckets: Sequence[Bucket], num_steps: int) -> tuple[Bucket, ...]:
    """Returns the shapes of the dispatches that propose `num_steps` draft tokens, given those of the served model.

    Where the served model decodes in a shape for all modes, one for all modes suffices.
    """
    decodes = [bucket for bucket in buckets if bucket.is_decode and bucket.num_steps == 1]
    sizes = {bucket.num_requests for bucket in buckets}
    whole = {bucket.num_requests for bucket in decodes if bucket.mode == ANY_MODE}
    fused = {(bucket.num_requests, bucket.mode) for bucket in decodes if bucket.num_requests not in whole}
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
