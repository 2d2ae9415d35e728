"""The products of tokens of which each may have an adapter."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshserve.kernels.linear import Linear, Matrix, Prologue

from .adapter_targets import PROJECTIONS
from .changes import NO_SLOT
from .peft_files import DOWN, UP


@dataclass(frozen=True)
class AdapterProducts:
    """Adds the low-rank product of its adapter to each projection of each token. Implements `Products`.

    All tokens are multiplied with the matrices A of all slots, side by side, the results of other slots are set to
    zero, and what is left is multiplied with the matrices B of all slots: two dense products of `slots x rank` columns,
    whatever adapters a step has. That is 128 columns for 8 adapters of rank 16, as many as the units for matrices of
    GPUs and TPUs take anyway, without sorting or copying matrices (docs/decisions/095-adapters.md). Steps whose tokens
    have one adapter, or none, multiply with that slot's matrices alone.

    Attributes:
      linear: The products with the model's own weights.
      bank: This shard's part of the matrices of all slots; see `AdapterBank.leaves`.
      slots: [T] int32, the slot of each token's adapter; NO_SLOT without one.
      only: The one slot that occurs among `slots`, or NO_SLOT if none does; None if there may be several.
    """

    linear: Linear
    bank: Mapping[str, jax.Array]
    slots: jax.Array
    only: jax.Array | None = None

    def __call__(
        self,
        x: jax.Array,
        weight: Matrix,
        *,
        name: str,
        layer: int | jax.Array,
        prologue: Prologue | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """See `Products`."""
        operands: dict[str, Any] = {"prologue": prologue, "residual": residual}
        product = self.linear(x, weight, **operands)
        if name not in PROJECTIONS or leaf(PROJECTIONS[name][0], DOWN) not in self.bank:
            return product
        inputs = x if prologue is None else prologue(x)
        parts = [self._low_rank(inputs, target, layer) for target in PROJECTIONS[name]]
        added = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return product + added.reshape(product.shape).astype(product.dtype)

    def _low_rank(self, x: jax.Array, target: str, layer: int | jax.Array) -> jax.Array:
        """Returns x A^T B^T [T, ..., rows] in float32, where each token has the A and B of its slot."""
        down, up = self._matrices(leaf(target, DOWN), layer), self._matrices(leaf(target, UP), layer)
        precision = "highest" if x.dtype == jnp.float32 else None
        common: dict[str, Any] = {"precision": precision, "preferred_element_type": jnp.dtype("float32")}
        inner = jnp.einsum("tk,srk->tsr", x, down, **common)
        is_own = self.slots[:, None] == jnp.arange(down.shape[0])
        if self.only is not None:
            is_own = self.slots[:, None] != NO_SLOT
        inner = jnp.where(is_own[:, :, None], inner, 0).astype(x.dtype)
        return jnp.einsum("tsr,s...r->t...", inner, up, **common)

    def _matrices(self, name: str, layer: int | jax.Array) -> jax.Array:
        """Returns a matrix of a layer for each slot that may occur, [slots, ...] or [1, ...]."""
        array = self.bank[name]
        if self.only is None:
            return array[layer]
        # A slice, not a gather: XLA's GEMMs on GPUs read it in place.
        rest = array.shape[2:]
        start = (layer, jnp.maximum(self.only, 0), *[0] * len(rest))
        return jax.lax.dynamic_slice(array, start, (1, 1, *rest))[0]

    def take(self, tokens: jax.Array) -> "AdapterProducts":
        """See `Products`."""
        return replace(self, slots=self.slots.at[tokens].get(mode="fill", fill_value=NO_SLOT))


def leaf(target: str, kind: str) -> str:
    """Returns the name of an array of the bank."""
    return f"{target}.{kind}"
