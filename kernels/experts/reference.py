"""The meaning of the experts: every expert computes every token, and each token adds up those it chose."""

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Cost
from meshserve.kernels.linear import layer_of

from .contract import ExpertShapes, ExpertsImplementation, ExpertStep, ExpertWeights, Routing


def experts(
    x: jax.Array, weights: ExpertWeights, routing: Routing, *, layer: int | jax.Array, num_experts: int
) -> jax.Array:
    """See `Experts`."""
    gate_up, down = layer_of(weights.gate_up, layer), layer_of(weights.down, layer)
    is_chosen = routing.experts[:, :, None] == jnp.arange(down.shape[0])
    shares = jnp.sum(jnp.where(is_chosen, routing.weights[:, :, None], 0.0), axis=1)
    gate, up = jnp.moveaxis(jnp.einsum("td,eifd->tief", x, gate_up, precision="highest"), 1, 0)
    outputs = jnp.einsum(
        "tef,edf->ted", jax.nn.silu(gate) * up, down, precision="highest", preferred_element_type=jnp.float32
    )
    outputs = jnp.where(shares[:, :, None] == 0.0, 0.0, shares[:, :, None] * outputs)
    return jnp.sum(outputs, axis=1).astype(x.dtype)


def cost(shapes: ExpertShapes, step: ExpertStep) -> Cost:
    """Estimates the cost of every expert for every token, in float32."""
    num_weights = shapes.num_local * shapes.num_weights
    return Cost(
        num_bytes=shapes.num_local * shapes.stored_bytes + 8 * num_weights,
        float32_operations=2.0 * step.num_tokens * num_weights,
        scratch_bytes=4 * num_weights,
    )


IMPLEMENTATION = ExpertsImplementation(name="reference", experts=experts, cost=cost)
