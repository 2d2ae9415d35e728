"""The contract of P2P operations, and how an implementation is described."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from meshserve.kernels.implementation import Implementation

MAX_BYTES = 2 << 20  # limit of an all-gather, of x in a decode step's layers, and of a one-shot all-reduce
_TWO_SHOT_RANKS = (2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PGroup:
    """Devices of one host that can write to each other's memory; opened by `sm90.open_p2p_group`."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PShapes:
    """What decides whether an implementation can serve a mesh."""

    dtype: jnp.dtype  # of the sums
    is_one_process: bool  # all devices belong to it


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PImplementation(Implementation[P2PShapes]):
    """An implementation of the P2P operations.

    Attributes:
      operations: The operations.
      open_group: Opens devices of this process, in order of their ranks along a mesh axis.
      seconds: The time of an all-reduce of few bytes within a host.
    """

    operations: P2POperations
    open_group: Callable[..., P2PGroup]
    seconds: float
