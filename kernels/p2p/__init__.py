"""P2P all-reduce and all-gather for small arrays, where a library's collective takes longer than the transfer itself.

A peer is a device of the same host whose memory this device can write to.

All devices must call the operations in the same order, inside a program over the mesh, and one after another: two
operations that do not depend on each other must not run at the same time.
"""

import dataclasses
from typing import Protocol

import jax

MAX_BYTES = 2 << 20  # limit of an all-gather, of x in a decode step's layers, and of a one-shot all-reduce
_TWO_SHOT_RANKS = (2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PGroup:
    """Devices of one host that can write to each other's memory; opened by `gpu.open_p2p_group`."""

    axis: str  # mesh axis along which the devices are ranked
    ordinals: tuple[int, ...]  # CUDA device ordinal of each rank


def takes_sum(num_bytes: int, num_ranks: int) -> bool:
    """Returns whether `p2p_all_reduce` supports arrays of `num_bytes`.

    Arrays above MAX_BYTES are summed in two shots, in which each rank sums one part.
    """
    if num_bytes <= MAX_BYTES:
        return num_bytes % 8 == 0
    return num_ranks in _TWO_SHOT_RANKS and num_bytes % (16 * num_ranks) == 0


class P2POperations(Protocol):
    """The interface of an implementation. Call its methods inside `shard_map`."""

    def p2p_all_reduce(self, x: jax.Array, p2p: P2PGroup) -> jax.Array:
        """Sums bfloat16 x over the ranks, in float32 and in rank order, so that all ranks get the same bits.

        The size of x must be one that `takes_sum` accepts.
        """
        ...

    def p2p_all_gather(self, x: jax.Array, p2p: P2PGroup) -> jax.Array:
        """Gathers x of every rank into [ranks, *x.shape].

        x has 32-bit elements, at most MAX_BYTES in total and a multiple of 8 bytes. An element whose bits are all ones
        arrives as 0x7FFF7FFF.
        """
        ...
