"""Times and checks all-reduces alone over the GPUs of one host: microseconds by size and implementation.

The timed all-reduces are chains of calls in one program, each followed by an elementwise product whose time is
subtracted.

The checked all-reduces sum numbers that every device generates for all ranks, so that it can compute the expected sum
itself, in float32. All elements of all sums are compared: those of the P2P all-reduce bit by bit, others with a
tolerance for rounding to bfloat16 at every rank.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshserve.benchmarks.lib.timing import time_steps
from meshserve.kernels.p2p import gpu as p2p_gpu
from meshserve.kernels.p2p import takes_sum
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

_CHAIN = 40  # all-reduces per program; each may grow 1e-20 by a factor of 8
_CHECKED = 1000  # all-reduces per program
_BFLOAT16_BITS = (8, 7)  # bits of the exponent and the mantissa
_HALF_STEP = 2.0**-9  # maximum relative rounding error of bfloat16

Sum = Callable[[jax.Array], jax.Array]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns the microseconds of an all-reduce over the mesh, by TP size, array size and implementation."""
    rows = []
    for tp in options.tp:
        mesh = make_mesh(tp)
        timed = {"nothing": lambda x: x, **implementations(mesh, options.all_reduce)}
        for kilobytes in options.kilobytes:
            per_call = {
                name: _time_chain(options, mesh, _num_elements(kilobytes), add)
                for name, add in timed.items()
                if _takes(name, kilobytes, tp)
            }
            base = per_call.pop("nothing")
            row = {"tp": tp, "kilobytes": kilobytes, **{name: 1000 * (ms - base) for name, ms in per_call.items()}}
            rows.append(row)
            figures = ", ".join(f"{name} {row[name]:6.1f} us" for name in per_call)
            print(f"tp {tp} {kilobytes:7.0f} KB: {figures} (product alone {1000 * base:.1f} us)", flush=True)
    return rows


def check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks all-reduces of all sizes in turn for `check_seconds` per TP size and implementation.

    Prints and returns rows with the number of wrong elements.
    """
    rows = []
    for tp in options.tp:
        mesh = make_mesh(tp)
        for name, add in implementations(mesh, options.all_reduce).items():
            tolerance = 0.0 if name == "p2p" else tp * _HALF_STEP
            programs = [
                wrong_elements(mesh, add, _num_elements(size), tolerance)
                for size in options.kilobytes
                if _takes(name, size, tp)
            ]
            if not programs:
                continue
            num_wrong = num_sums = 0
            began = time.monotonic()
            while (seconds := time.monotonic() - began) < options.check_seconds:
                for program in programs:
                    num_wrong += int(np.asarray(program(num_sums)).sum())
                    num_sums += _CHECKED
            rows.append(
                {"tp": tp, "implementation": name, "seconds": seconds, "num_sums": num_sums, "num_wrong": num_wrong}
            )
            print(
                f"tp {tp} {name}: {num_sums:,} all-reduces in {seconds:.0f} s, {num_wrong:,} wrong elements",
                flush=True,
            )
    return rows


def implementations(mesh: Mesh, all_reduce: str = "auto") -> Mapping[str, Sum]:
    """Returns the implementations that run here and match `all_reduce`; call them inside `shard_map`."""
    found: dict[str, Sum] = {}
    if all_reduce != "p2p":
        found["psum"] = lambda x: jax.lax.psum(x, TENSOR_AXIS)
    if all_reduce != "xla" and mesh.devices.flat[0].platform == "gpu":
        p2p = p2p_gpu.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))
        found["p2p"] = partial(p2p_gpu.p2p_all_reduce, p2p=p2p)
    return found


def _num_elements(kilobytes: float) -> int:
    return int(kilobytes * 1024) // 2


def _takes(name: str, kilobytes: float, tp: int) -> bool:
    return name != "p2p" or takes_sum(2 * _num_elements(kilobytes), tp)


def _time_chain(options: argparse.Namespace, mesh: Mesh, num_elements: int, add: Sum) -> float:
    """Returns the milliseconds per all-reduce of a chain, with products that keep XLA from merging the calls."""

    def chain(x: jax.Array, factor: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = jax.lax.optimization_barrier(add(x)) * factor
        return x

    spec = PartitionSpec(TENSOR_AXIS)
    program = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    draw = np.random.default_rng(0)
    x = jnp.asarray(1e-20 * draw.standard_normal(mesh.size * num_elements), jnp.bfloat16)
    factor = jnp.asarray(draw.uniform(0.9, 1.1, mesh.size * num_elements), jnp.bfloat16)
    x, factor = (jax.device_put(array, jax.sharding.NamedSharding(mesh, spec)) for array in (x, factor))
    times, _ = time_steps(partial(program, x, factor), options.rounds, options.steps)
    return statistics.median(times) / _CHAIN


def wrong_elements(
    mesh: Mesh, add: Sum, num_elements: int, tolerance: float, num_sums: int = _CHECKED
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
    ranks = jax.device_put(np.arange(mesh.size, dtype=np.int32), jax.sharding.NamedSharding(mesh, spec))
    return lambda first: program(ranks, np.array([first], np.int32))


def shares_of(rank: jax.Array | int, number: jax.Array | int, num_elements: int) -> jax.Array:
    """Returns bfloat16 numbers of either sign with magnitudes from 2^-3 to 1, different for each rank and number."""
    words = jnp.arange(num_elements, dtype=jnp.uint32) * jnp.uint32(2654435761)
    seed = jnp.asarray(number).astype(jnp.uint32) * jnp.uint32(40503)
    words = words ^ (seed + jnp.asarray(rank).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    words = (words ^ (words >> 15)) * jnp.uint32(0x85EBCA6B)
    words = words ^ (words >> 13)
    return jax.lax.bitcast_convert_type(((words & 0x81FF) | 0x3E00).astype(jnp.uint16), jnp.bfloat16)
