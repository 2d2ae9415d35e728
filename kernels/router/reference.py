"""The meaning of a router, in operations that XLA compiles for any backend."""

import jax
import jax.numpy as jnp

from meshserve.kernels.experts import Routing

from . import RouterOptions


def route(x: jax.Array, router: jax.Array, options: RouterOptions, positions: jax.Array | None = None) -> Routing:
    """Returns the experts that each token goes through.

    Args:
      x: [T, D], normalized hidden states.
      router: [experts, D], the router's weights.
      options: How it chooses.
      positions: [T] of each token, -1 for padding, which chooses no expert (-1); None if no token is padding.

    Returns:
      Choices and shares. Scores and shares are float32.
    """
    precision = "highest" if x.dtype == jnp.float32 else None
    scores = jnp.einsum("td,ed->te", x, router, precision=precision, preferred_element_type=jnp.float32)
    routing = choose(scores, options)
    if positions is None:
        return routing
    return routing._replace(experts=jnp.where(positions[:, None] < 0, -1, routing.experts))


def choose(scores: jax.Array, options: RouterOptions) -> Routing:
    """Returns the best experts by their scores [T, experts]. Among equal scores the lower expert comes first."""
    shares, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), options.num_chosen)
    if options.is_normalized:
        shares /= jnp.sum(shares, axis=-1, keepdims=True)
    return Routing(experts, shares)
