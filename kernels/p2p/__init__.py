"""Small sums and exchanges over the devices of a mesh, for when the wire takes less time than a library's collective.

A peer is a device of the same host whose memory can be written to.

Every device calls them in the same order, inside a program over the mesh, one after another: two that do not depend on
each other must not run at the same time.
"""

import dataclasses
from typing import Protocol

import jax

MAX_BYTES = 2 << 20  # of an exchange, of a decode step's layers, and of a sum in one shot
_TWO_SHOT_RANKS = (2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PGroup:
    """Devices of one host that reach each other's memory (`gpu.open_p2p_group`)."""

    axis: str  # of the mesh, along which they lie by rank
    ordinals: tuple[int, ...]  # of each rank's CUDA device


def takes_sum(num_bytes: int, num_ranks: int) -> bool:
    """Whether `p2p_all_reduce` takes so many bytes. More than MAX_BYTES goes in two shots, cut into a part a rank."""
    if num_bytes <= MAX_BYTES:
        return num_bytes % 8 == 0
    return num_ranks in _TWO_SHOT_RANKS and num_bytes % (16 * num_ranks) == 0


class P2POperations(Protocol):
    """An implementation. Call inside `shard_map`."""

    def p2p_all_reduce(self, x: jax.Array, p2p: P2PGroup) -> jax.Array:
        """The sum over the ranks of bfloat16 x, of a size that `takes_sum` allows; added up in float32 in the order of
        the ranks, so that all ranks get the same bits."""
        ...

    def p2p_all_gather(self, x: jax.Array, p2p: P2PGroup) -> jax.Array:
        """What every rank has for x, 32-bit elements, at most MAX_BYTES and a multiple of 8 bytes: [ranks, *x.shape].
        An element of all ones arrives as 0x7FFF7FFF."""
        ...
