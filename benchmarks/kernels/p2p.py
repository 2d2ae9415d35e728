"""All-reduces over the first `--tp` GPUs of this host: by P2P and by XLA (`psum`).

The timed all-reduces are a chain in one program, each followed by an elementwise product whose time is subtracted.
Bytes are those that a device must receive, which are compared with the links of the data sheet.

With `--check-seconds`, all-reduces are checked instead, in turn those of all sizes: all elements of all sums, those of
P2P bit by bit, XLA's with a tolerance for rounding to bfloat16 at every rank. Exits with 1 if one is wrong.
"""

import argparse
import functools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshserve.kernels.p2p import sm90, takes_sum
from meshserve.kernels.p2p.cases import NUM_SUMS, Case, Sum, wrong_elements
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

from .call import Call

IMPLEMENTATIONS = ("p2p", "psum")
_KILOBYTES = (*(2.0**power for power in range(2, 13)), 32768.0)
_CHAIN = 40  # all-reduces per program; each may grow 1e-20 by a factor of 8
_HALF_STEP = 2.0**-9  # maximum relative rounding error of bfloat16


def add_options(group: Any) -> None:
    group.add_argument("--kilobytes", nargs="+", type=float, default=_KILOBYTES, help="sizes of an all-reduce")
    group.add_argument("--check-seconds", type=float, default=0.0, help="check sums for this long instead of timing")


def cases(options: argparse.Namespace) -> list[Case]:
    return [Case(tp=options.tp, kilobytes=kilobytes) for kilobytes in options.kilobytes]


@functools.cache
def all_reduce(mesh: Mesh, name: str) -> Sum:
    """Returns an implementation, to be called inside `shard_map`."""
    if name == "psum":
        return lambda x: jax.lax.psum(x, TENSOR_AXIS)
    if mesh.devices.flat[0].platform != "gpu":
        raise ValueError("P2P all-reduces need GPUs")
    p2p = sm90.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))
    return partial(sm90.p2p_all_reduce, p2p=p2p)


def _supported(case: Case, name: str) -> bool:
    return name != "p2p" or takes_sum(2 * case.num_elements, case.tp)


def call(options: argparse.Namespace, case: Case, name: str) -> Call:
    mesh = make_mesh(case.tp)
    if not _supported(case, name):
        raise ValueError(f"P2P all-reduces over {case.tp} devices do not take {case.kilobytes:g} KB")
    spec = PartitionSpec(TENSOR_AXIS)
    draw = np.random.default_rng(0)
    size = mesh.size * case.num_elements
    arrays = (1e-20 * draw.standard_normal(size), draw.uniform(0.9, 1.1, size))
    x, factor = (jax.device_put(jnp.asarray(each, jnp.bfloat16), NamedSharding(mesh, spec)) for each in arrays)

    def program(add: Sum) -> Callable[[jax.Array], jax.Array]:
        def chain(x: jax.Array, factor: jax.Array) -> jax.Array:
            for _ in range(_CHAIN):  # the products keep XLA from merging the calls
                x = jax.lax.optimization_barrier(add(x)) * factor
            return x

        mapped = jax.shard_map(chain, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        compiled = jax.jit(mapped)
        return lambda _: compiled(x, factor)

    return Call(
        run=program(all_reduce(mesh, name)),
        state=None,
        num_calls=_CHAIN,
        link_bytes=2 * 2 * case.num_elements * (case.tp - 1) / case.tp,
        overhead=program(lambda x: x),
    )


def check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks all-reduces for `check_seconds`. Prints and returns rows with the number of wrong elements."""
    rows = []
    mesh = make_mesh(options.tp)
    for name in options.implementation or IMPLEMENTATIONS:
        try:
            add = all_reduce(mesh, name)
        except ValueError as error:
            print(f"{name} is not supported here: {error}", flush=True)
            continue
        tolerance = 0.0 if name == "p2p" else options.tp * _HALF_STEP
        programs = [
            wrong_elements(mesh, add, case.num_elements, tolerance) for case in cases(options) if _supported(case, name)
        ]
        num_wrong = num_sums = 0
        began = time.monotonic()
        while programs and (seconds := time.monotonic() - began) < options.check_seconds:
            for program in programs:
                num_wrong += int(np.asarray(program(num_sums)).sum())
                num_sums += NUM_SUMS
        row = {"tp": options.tp, "implementation": name, "num_sums": num_sums, "num_wrong": num_wrong}
        rows.append({**row, "seconds": seconds})
        print(
            f"tp {options.tp} {name}: {num_sums:,} all-reduces in {seconds:.0f} s, {num_wrong:,} wrong elements",
            flush=True,
        )
    return rows
