"""The products of decoder layers: the hook through which tokens can bring adapters (LoRA) along."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from meshserve.kernels.linear import Linear, Matrix, Prologue


class Products(Protocol):
    """Multiplies the tokens of a step by projections of its layers, like `Linear`, but knows which projection it is.

    The layers call it for each of their projections and never ask whether a token has an adapter. An implementation
    with adapters holds the adapter slot of each token and adds the low-rank product of the named projection. Fused
    layers multiply without it, so steps with adapters run none; see `Kernels.with_adapters`.
    """

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
        """Computes x weight^T, or residual + x weight^T; see `Linear`.

        A shard has its rows or its columns of the matrix. With columns, the results of all shards are added up, so an
        adapter's first matrix is sharded in the same way, and its product is added on each shard.

        Args:
          x: [T, K], or what `prologue` takes.
          weight: This shard's part of the projection.
          name: The parameter's name in its layer, for example "attention.qkv".
          layer: The layer's index in the model, traced in a loop over layers.
          prologue: Operation on x before the product.
          residual: [T, rows].
        """

    def take(self, tokens: jax.Array) -> "Products":
        """Returns the products for these tokens of the step: indices [N]; those beyond all tokens are padding."""


@dataclass(frozen=True)
class PlainProducts:
    """The products of tokens that bring nothing along. Implements `Products`."""

    linear: Linear

    def __call__(
        self, x: jax.Array, weight: Matrix, *, name: str, layer: int | jax.Array, **operands: Any
    ) -> jax.Array:
        return self.linear(x, weight, **operands)

    def take(self, tokens: jax.Array) -> "PlainProducts":
        return self
