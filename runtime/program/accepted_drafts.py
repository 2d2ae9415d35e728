"""Finds on the device which draft tokens are accepted, so that processors sample after them. Serves step 7 of 10."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp


class DraftRows(NamedTuple):
    """The drafts that precede each of B rows, at most N."""

    state_slots: jax.Array  # [B] int32, the slot whose state a row reads and counts in
    sampled_rows: jax.Array  # [B, N] int32, the rows whose samples must equal the drafts
    drafts: jax.Array  # [B, N] int32, -1 for none

    @classmethod
    def unpacked(cls, fields: Mapping[str, jax.Array], num_drafts: int) -> Self:
        """Takes them from the packed fields; without drafts, N is 0."""
        if not num_drafts:
            empty = jnp.zeros((len(fields["slots"]), 0), jnp.int32)
            return cls(fields["slots"], empty, empty)
        behind = fields["first_draft_row"][:, None] + jnp.arange(num_drafts - 1)
        sampled_rows = jnp.concatenate([fields["first_row"][:, None], behind], axis=1)
        drafts = jnp.stack([fields[f"draft_{index}"] for index in range(num_drafts)], axis=1) - 1
        return cls(fields["state_slots"], sampled_rows, drafts)

    def counted(self, history: jax.Array, first_token_id: jax.Array) -> jax.Array:
        """Returns the rows' histories [B, V / shards] with their drafts added. Written per shard."""
        column = self.drafts - first_token_id
        is_here = (self.drafts >= 0) & (column >= 0)  # columns beyond the shard are dropped
        column = jnp.where(is_here, column, history.shape[1])
        return history.at[jnp.arange(len(history))[:, None], column].add(1, mode="drop")

    def are_accepted(self, tokens: jax.Array) -> jax.Array:
        """Returns whether all drafts before each row are accepted, [B] bool, given the sample [B] of each row."""
        return ((self.drafts < 0) | (self.drafts == tokens[self.sampled_rows])).all(axis=1)
