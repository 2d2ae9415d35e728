"""The contract of experts, and how an implementation is described. See the package for the dimensions."""

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost, Implementation
from meshserve.kernels.linear import Matrix, QuantizedMatrix


class ExpertWeights(NamedTuple):
    """The weights stacked over layers, row-major [out, in] as Hugging Face stores them. Both may be quantized."""

    gate_up: Matrix  # [L, E, 2, F, D]: gate, then up
    down: Matrix  # [L, E, D, F]

    @property
    def quantized(self) -> tuple[QuantizedMatrix, QuantizedMatrix] | None:
        """`gate_up` and `down` if both are quantized, else None."""
        if isinstance(self.gate_up, QuantizedMatrix) and isinstance(self.down, QuantizedMatrix):
            return self.gate_up, self.down
        return None


class Routing(NamedTuple):
    """The experts that each token chose."""

    experts: jax.Array  # [T, k] int32, distinct within a token; one outside of 0..E-1 is not computed here
    weights: jax.Array  # [T, k] float32: by which each expert's output is multiplied


class Experts(Protocol):
    """The interface of an implementation."""

    def __call__(
        self, x: jax.Array, weights: ExpertWeights, routing: Routing, *, layer: int | jax.Array, num_experts: int
    ) -> jax.Array:
        """Computes, for each token t, the sum over j of weights[t, j] * down(silu(gate(x[t])) * up(x[t])).

        Args:
          x: [T, D]. Rows without an expert of this block may hold anything, even NaN.
          weights: the experts of all layers.
          routing: the choices of the tokens.
          layer: index of the layer.
          num_experts: number of experts that the tokens chose from, on all devices together. It only tells how many
            tokens an expert gets on average.

        Returns:
          [T, D] in x's dtype, accumulated in float32; 0 for tokens without an expert of this block.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertShapes:
    """What decides whether an implementation can serve a model, on one device's block."""

    weights: ExpertWeights  # or their shapes
    dtype: jnp.dtype  # of tokens

    @property
    def num_local(self) -> int:
        return self.weights.down.shape[1]

    @property
    def num_weights(self) -> int:
        """The weights of an expert."""
        return sum(math.prod(stack.shape[2:]) for stack in self.weights)

    @property
    def stored_bytes(self) -> float:
        """The bytes of an expert as it is stored, with its share of scales."""
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.weights))
        return num_bytes / math.prod(self.weights.down.shape[:2])


class ExpertStep(NamedTuple):
    """What a step asks of a layer's experts on the busiest device."""

    num_tokens: int
    num_read: float  # experts of its block that a token chose
    num_choices: float  # tokens that go through an expert of its block, counted once per expert
    num_experts: int  # that the tokens chose from, on all devices together


class ExpertCost(Protocol):
    """Estimates what the experts of one layer take."""

    def __call__(self, shapes: ExpertShapes, step: ExpertStep) -> Cost: ...


def least_cost(shapes: ExpertShapes, step: ExpertStep) -> Cost:
    """Returns the cost of an implementation that reads each chosen expert once, as it is stored, and pads nothing."""
    num_bytes, operations = step.num_read * shapes.stored_bytes, 2.0 * step.num_choices * shapes.num_weights
    if jnp.dtype(shapes.dtype).itemsize > 2:
        return Cost(num_bytes=num_bytes, float32_operations=operations)
    return Cost(num_bytes=num_bytes, operations=operations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsImplementation(Implementation[ExpertShapes]):
    """An implementation of the experts."""

    experts: Experts
    cost: ExpertCost
