"""The meaning of the experts: every expert computes every token, and each token adds up those it chose."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from meshserve.kernels.linear import layer_of

if TYPE_CHECKING:
    from . import ExpertWeights, Routing


def experts(
    x: jax.Array, weights: "ExpertWeights", routing: "Routing", *, layer: int | jax.Array, num_experts: int
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
