"""Repeats decode steps over the GPUs of one host and checks that their results are always the same.

    meshserve bench repeated_steps --model qwen3-8b --tp 4 --batch 1 32 --seconds 600

All layers of a step run on the same tokens each time, so their result has the same bits each time and on every device,
unless an all-reduce of some layer read a wrong word: the difference then propagates through all later layers. The
weights are random, and the kernels are those that a server would use, without its own test of P2P all-reduces. Batch
sizes take turns. Exits with 1 if a result differs.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model.strategies import StepInputs, forward
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.step import CACHE_AXES, CacheShape, state_shapes, weights_of
from meshserve.runtime.resolve.kernel_selection import P2PFindings
from meshserve.runtime.resolve.resolved_server import PlacedServer, resolve_here
from meshserve.runtime.startup.launch import open_model
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh, partition_spec, use_cpu_devices, use_dispatch_threads

_REPEATS = 100  # steps per program
_SETTINGS = {"page_size": 64, "dtype": "bfloat16"}
_EACH = PartitionSpec(TENSOR_AXIS)  # one value per device


@dataclasses.dataclass
class Found:
    """The differences found in the steps of one batch."""

    num_steps: int = 0
    num_changed: int = 0  # elements that differ from the first step's
    num_unlike: int = 0  # steps whose result differs between devices


class Repeats:
    """The layers of one batch's decode step, with their own KV cache; compiles on construction.

    Args:
      structure, params: The model.
      server: Where it runs, and with which kernels.
      context: Tokens of each request, of which the step decodes the last.
    """

    def __init__(self, structure: nnx.GraphDef, params: nnx.State, server: PlacedServer, *, batch: int, context: int):
        self.batch, self.found = batch, Found()
        self._first: np.ndarray | None = None
        self._weights: tuple[jax.Array, ...] = weights_of(params)
        mesh, kernels, page_size = server.mesh, server.kernels, server.limits.page_size
        cache_spec, num_pages = partition_spec(CACHE_AXES), -(-context // page_size)
        shape = CacheShape(batch * num_pages, page_size, batch, num_pages)
        cache = state_shapes(server.model, server.layout, shape, server.cache_dtype).cache
        zeros = partial(jnp.zeros, cache.shape, cache.dtype)
        self._cache = jax.jit(zeros, out_shardings=jax.sharding.NamedSharding(mesh, cache_spec))()
        tree = jax.tree.structure(params)
        page_table = np.arange(cache.shape[1], dtype=np.int32).reshape(batch, -1)

        def of_shard(
            weights: tuple[jax.Array, ...], cache: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            model = nnx.merge(structure, jax.tree.unflatten(tree, weights))
            rows = jnp.arange(batch, dtype=jnp.int32)
            tokens = PagedBatch(jnp.full(batch, context - 1, jnp.int32), rows, jnp.asarray(page_table))
            step = StepInputs(rows, tokens, kernels.products)
            found = forward(model, kernels, cache, step)
            first = found.wanted

            def again(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                cache, num_changed, num_unlike = carry
                repeated = forward(model, kernels, cache, step)
                x = repeated.wanted
                num_changed += (_bits(x) != _bits(first)).sum(dtype=jnp.int32)
                checksums = jax.lax.all_gather(_checksum(x), TENSOR_AXIS)
                return repeated.cache, num_changed, num_unlike + (checksums != checksums[0]).any().astype(jnp.int32)

            carry = jax.lax.fori_loop(0, _REPEATS, again, (found.cache, jnp.int32(0), jnp.int32(0)))
            cache, num_changed, num_unlike = carry
            return cache, first[None], num_changed[None], num_unlike[None]

        program = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(tuple(jax.tree.leaves(specs_of(params))), cache_spec),
            out_specs=(cache_spec, _EACH, _EACH, _EACH),
            check_vma=False,
        )
        self._program = jax.jit(program, donate_argnums=1).lower(self._weights, self._cache).compile()

    def run(self) -> None:
        """Runs about a hundred more steps and compares them with the very first step and among the devices."""
        self._cache, first, num_changed, num_unlike = self._program(self._weights, self._cache)
        bits = np.asarray(first).view(np.uint16)
        self._first = bits[:1] if self._first is None else self._first
        self.found.num_steps += _REPEATS + 1
        self.found.num_changed += int((bits != self._first).sum() + np.asarray(num_changed).sum())
        self.found.num_unlike += int(np.asarray(num_unlike)[0])


def run_for(cases: Sequence[Repeats], seconds: float) -> float:
    """Runs all cases in turn, at least once, for the given time, and returns the seconds that it took."""
    began = time.monotonic()
    while True:
        for case in cases:
            case.run()
        if (passed := time.monotonic() - began) >= seconds:
            return passed


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.cpu_devices:
        use_cpu_devices(options.cpu_devices)
    else:
        use_dispatch_threads()
    model, make_params = open_model(options.model, random_weights=True)
    settings = {**_SETTINGS, "max_running": max(options.batch), **parse_settings(options.set)}
    config = ServeConfig(model=options.model, random_weights=True, tp=options.tp, **settings)
    server = resolve_here(config, model, make_mesh(options.tp), P2PFindings())
    structure, params = make_params(server.model, server.layout, server.mesh, server.dtype)
    cases = [Repeats(structure, params, server, batch=batch, context=options.context) for batch in options.batch]
    seconds = run_for(cases, options.seconds)
    rows = [
        {"model": options.model, "tp": options.tp, "batch": case.batch, "seconds": seconds, **vars(case.found)}
        for case in cases
    ]
    for row in rows:
        print(
            f"{options.model} tp {options.tp} batch {row['batch']:4}: {row['num_steps']:,} steps, "
            f"{row['num_changed']:,} elements differ from the first step, {row['num_unlike']:,} steps differ between "
            "devices"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(row["num_changed"] or row["num_unlike"] for row in rows) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench repeated_steps", description="Check that repeated decode steps have the same results."
    )
    parser.add_argument("--model", default="qwen3-8b", help="published size (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of meshserve serve")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _checksum(x: jax.Array) -> jax.Array:
    """Returns a uint32 checksum in which each element has a different odd weight."""
    bits = _bits(x).reshape(-1).astype(jnp.uint32)
    return (bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32)


if __name__ == "__main__":
    raise SystemExit(main())
