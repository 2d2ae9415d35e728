"""What a trained head is to the steps of the served model: something that they keep up to date. Serves step 6 of 10.

A trained head reads the hidden states of the served model, so each step must compute what the head needs of its tokens,
in the same program: what is not kept is lost. A head whose keys and values depend on its inputs alone, as those of a
single layer do, has little to compute: it costs a step about a hundredth, and nothing is missing when drafting begins
after a pause.
"""

from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch


class Follow(Protocol):
    """A head with this shard's weights. Called inside `shard_map`, as part of a step."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the served model, ascending, whose inputs the head reads."""

    def __call__(self, state: Any, captured: list[jax.Array], token_ids: jax.Array, batch: PagedBatch) -> Any:
        """Returns what the head keeps, with a step's tokens.

        Args:
          state: What it keeps. Its leaves are consumed.
          captured: [T, D] each, the inputs of `layers`.
          token_ids: [T] int32.
          batch: Where each token belongs.
        """


class HeadContract(Protocol):
    """A head, as steps are compiled with it."""

    @property
    def weights(self) -> tuple[Any, ...]:
        """Its weights: arrays, or shapes with shardings."""

    @property
    def weight_specs(self) -> tuple[PartitionSpec, ...]:
        """How each of its weights is sharded."""

    @property
    def state_specs(self) -> Any:
        """How what it keeps is sharded, as a tree."""

    def state_shapes(self, shape: Any) -> Any:
        """Returns what it keeps in a cache of a `program.step.CacheShape`, as shapes with shardings."""

    def bound(self, weights: tuple[jax.Array, ...]) -> Follow:
        """Returns the head with this shard's weights."""
