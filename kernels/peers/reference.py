"""The meaning of the operations, by jax's own collectives, for any backend."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from . import Peers


def peer_sum(x: jax.Array, peers: "Peers") -> jax.Array:
    """See `PeerOperations`."""
    shares = jax.lax.all_gather(x.astype(jnp.float32), peers.axis)
    return sum(shares[1:], start=shares[0]).astype(x.dtype)


def peer_exchange(x: jax.Array, peers: "Peers") -> jax.Array:
    """See `PeerOperations`."""
    return jax.lax.all_gather(x, peers.axis)
