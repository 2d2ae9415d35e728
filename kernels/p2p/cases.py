"""Sizes of all-reduces, and programs that check every element of many of them, for the tests and the benchmark.

Every device generates the numbers of all ranks, so that it can compute the expected sum itself, in float32.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NUM_SUMS = 1000  # all-reduces in a checking program
_BFLOAT16_BITS = (8, 7)  # bits of the exponent and the mantissa

Sum = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An all-reduce of bfloat16 numbers over `tp` devices."""

    tp: int
    kilobytes: float

    @property
    def name(self) -> str:
        return f"tp {self.tp} {self.kilobytes:g} KB"

    @property
    def num_elements(self) -> int:
        return int(self.kilobytes * 1024) // 2


def wrong_elements(
    mesh: Mesh, add: Sum, num_elements: int, tolerance: float, num_sums: int = NUM_SUMS
) -> Callable[[int], jax.Array]:
    """Returns a program that runs `num_sums` all-reduces of new numbers and counts the wrong elements of each rank.

    The program takes the index of the first sum. `tolerance` is relative to the sum of the absolute values of the
    shares.
    """

    def of_rank(rank: jax.Array, first: jax.Array) -> jax.Array:
        def of_sum(index: jax.Array, num_wrong: jax.Array) -> jax.Array:
            number = first[0] + index
            shares = [shares_of(other, number, num_elements).astype(jnp.float32) for other in range(mesh.size)]
            # A conversion to bfloat16 and back would be removed by XLA.
            exact = jax.lax.reduce_precision(sum(shares[1:], start=shares[0]), *_BFLOAT16_BITS)
            got = add(shares_of(rank[0], number, num_elements)).astype(jnp.float32)
            allowed = tolerance * sum(map(jnp.abs, shares))
            return num_wrong + (~(jnp.abs(got - exact) <= allowed)).sum(dtype=jnp.int32)  # NaN counts as wrong

        return jax.lax.fori_loop(0, num_sums, of_sum, jnp.int32(0))[None]

    spec = PartitionSpec(mesh.axis_names[0])
    program = jax.jit(
        jax.shard_map(of_rank, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    )
    ranks = jax.device_put(np.arange(mesh.size, dtype=np.int32), NamedSharding(mesh, spec))
    return lambda first: program(ranks, np.array([first], np.int32))


def shares_of(rank: jax.Array | int, number: jax.Array | int, num_elements: int) -> jax.Array:
    """Returns bfloat16 numbers of either sign with magnitudes from 2^-3 to 1, different for each rank and number."""
    words = jnp.arange(num_elements, dtype=jnp.uint32) * jnp.uint32(2654435761)
    seed = jnp.asarray(number).astype(jnp.uint32) * jnp.uint32(40503)
    words = words ^ (seed + jnp.asarray(rank).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    words = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    words = words ^ (words >> 13)
    return jax.lax.bitcast_convert_type(((words & 0x81FF) | 0x3E00).astype(jnp.uint16), jnp.bfloat16)
