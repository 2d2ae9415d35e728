"""Measures how decoding scales over the GPUs of one host: step times at several TP sizes, and the all-reduces alone.

    meshserve bench scaling --model qwen3-8b qwen3-32b --tp 1 2 4 --batch 1 32 --context 1024 --plot scaling.png
    meshserve bench scaling --only-all-reduces --tp 2 4                     # only the all-reduces: see all_reduces.py
    meshserve bench scaling --only-all-reduces --tp 4 --check-seconds 600   # checks every all-reduce
    meshserve bench scaling --tp 4 --check-seconds 600                 # checks whole steps: see repeats.py

A step is the served program of a decode bucket, including sampling, with random weights, keys and values. It is
dispatched as the engine does it, but without a scheduler; the host's own time per dispatch is printed with it. Figures
are medians over rounds of steps that the devices run without waiting for the host.

Efficiency is the time at the smallest TP size divided by the time at this one, per device. The share of the collectives
is the time that a single device saves when it runs its shard alone, as a smaller model without all-reduces (--alone).
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from meshserve.benchmarks.kernels import all_reduces, repeats
from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading, at_power
from meshserve.benchmarks.lib.kernel_times import kernel_table
from meshserve.benchmarks.lib.timing import time_steps
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.model_config import ModelConfig
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.model.qwen3 import Kernels
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.planning.kernel_selection import P2PFindings
from meshserve.runtime.planning.resolved_server import resolve_here
from meshserve.runtime.planning.server_programs import ServerPrograms
from meshserve.runtime.program.batch import ON_DEVICE, Bucket
from meshserve.runtime.program.step import CACHE_AXES, CacheShape, DeviceState, placed_state, state_shapes
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import abstract_model, named_model
from meshserve.sharding.mesh import (
    TENSOR_AXIS,
    make_mesh,
    named_sharding,
    partition_spec,
    use_cpu_devices,
    use_dispatch_threads,
)

_DTYPE = jnp.dtype("bfloat16")
_CACHE_SEED = 1_000_003  # not used for any weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the table, with times in milliseconds."""

    model: str
    tp: int
    batch: int
    context: int
    step_ms: float
    p10_ms: float
    p90_ms: float
    dispatch_ms: float  # the host's time for one dispatch
    compile_seconds: float
    power: Reading | None = None  # of the GPU with the highest power
    alone_ms: float | None = None  # step time of one shard on a single device
    efficiency: float | None = None

    def text(self) -> str:
        alone = "" if self.alone_ms is None else f", collectives {1 - self.alone_ms / self.step_ms:4.0%}"
        efficiency = "" if self.efficiency is None else f", efficiency {self.efficiency:4.0%}"
        return (
            f"{self.model:10} tp {self.tp} batch {self.batch:4} context {self.context:6}: "
            f"{self.step_ms:7.3f} ms a step (P10 {self.p10_ms:.3f}, P90 {self.p90_ms:.3f}), "
            f"host {self.dispatch_ms:.3f} ms per dispatch{alone}{efficiency}{at_power(self.power)}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.cpu_devices:
        use_cpu_devices(options.cpu_devices)
    elif not options.one_dispatcher:
        use_dispatch_threads()
    is_well = True
    if options.only_all_reduces:
        rows = all_reduces.check(options) if options.check_seconds else all_reduces.measure(options)
        is_well = not any(row.get("num_wrong") for row in rows)
    elif options.check_seconds:
        rows = check_steps(options)
        is_well = not any(row["num_changed"] or row["num_unlike"] for row in rows)
    else:
        steps = with_efficiency(measure_steps(options))
        rows = [dataclasses.asdict(step) for step in steps]
        print(*(step.text() for step in steps), sep="\n")
        if options.plot:
            plot(steps, options.plot)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if is_well else 1


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench scaling", description="Measure decoding over the GPUs of one host."
    )
    parser.add_argument("--model", nargs="+", default=["qwen3-8b"], help="published sizes (default: %(default)s)")
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument(
        "--context", type=int, default=1024, help="context tokens of each request (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="number of layers of each model, 0 for all (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab", type=int, default=0, help="vocabulary of each model, 0 for its own (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps per round (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="also time one shard alone")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--decode-layers", default="auto", help="cuda, reference, off or auto (default: %(default)s)")
    parser.add_argument("--attention", default="auto", help="cuda, reference or auto (default: %(default)s)")
    parser.add_argument(
        "--only-all-reduces", action="store_true", help="time the all-reduces over the mesh instead of steps"
    )
    sizes = [*(2.0**power for power in range(2, 13)), 32768.0]
    parser.add_argument(
        "--kilobytes", nargs="+", type=float, default=sizes, help="size of an all-reduce (default: %(default)s)"
    )
    parser.add_argument(
        "--check-seconds",
        type=float,
        default=0.0,
        help="check results for this long at each TP size, instead of timing",
    )
    parser.add_argument("--expert-parallel", action="store_true", help="give each device whole experts")
    parser.add_argument("--all-reduce", default="auto", help="p2p, xla or auto (default: %(default)s)")
    parser.add_argument("--one-dispatcher", action="store_true", help="dispatch to all GPUs from one thread")
    parser.add_argument("--cpu-devices", type=int, default=0)
    parser.add_argument(
        "--profile", type=Path, help="trace more steps of the last case into this folder, and print the kernels"
    )
    parser.add_argument("--plot", type=Path, help="draw the steps into this file (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def measure_steps(options: argparse.Namespace) -> list[Step]:
    """Times every model at every TP size, with every batch size."""
    steps = []
    for name in options.model:
        model = _model(options, name)
        for tp in options.tp:
            alone_ms: list[float] = []
            if options.alone and tp > 1:
                alone_ms = [step.step_ms for step in _time_model(options, name, shard_of(model, tp), 1)]
            for index, step in enumerate(_time_model(options, name, model, tp)):
                steps.append(dataclasses.replace(step, alone_ms=alone_ms[index] if alone_ms else None))
                print(steps[-1].text(), flush=True)
    return steps


def check_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks steps of every model at every TP size, alternating all batch sizes for `check_seconds`.

    Prints and returns one row per batch size.
    """
    rows = []
    for name in options.model:
        model = _model(options, name)
        for tp in options.tp:
            mesh = make_mesh(tp)
            structure, params = random_params(model, mesh, expert_parallel=options.expert_parallel)
            cases = []
            for batch in options.batch:
                kernels = _kernels(options, model, mesh, batch)
                cache = _state_shapes(options, model, tp, batch).cache
                case = repeats.Repeats(structure, params, kernels, cache, mesh, batch=batch, context=options.context)
                cases.append(case)
            seconds = repeats.run_for(cases, options.check_seconds)
            for case in cases:
                found = case.found
                rows.append({"model": name, "tp": tp, "batch": case.batch, "seconds": seconds, **vars(found)})
                print(
                    f"{name:10} tp {tp} batch {case.batch:4}: {found.num_steps:,} steps, {found.num_changed:,} "
                    f"elements differ from the first step, {found.num_unlike:,} steps differ between devices",
                    flush=True,
                )
    return rows


def _model(options: argparse.Namespace, name: str) -> ModelConfig:
    model = named_model(name)
    changes = {"num_layers": options.layers, "vocab_size": options.vocab}
    return dataclasses.replace(model, **{field: value for field, value in changes.items() if value})


def _kernels(options: argparse.Namespace, model: ModelConfig, mesh: Mesh, batch: int) -> Kernels:
    """Returns the kernels that a server would use, without its test of P2P sums; see `--check-seconds`."""
    config = ServeConfig(
        model="random", tp=mesh.size, page_size=options.page_size, max_running=batch, attention=options.attention,
        decode_layers=options.decode_layers, all_reduce=options.all_reduce, dtype=_DTYPE.name,
        expert_parallel=options.expert_parallel,
    )  # fmt: skip
    return resolve_here(config, model, mesh, P2PFindings()).kernels


def shard_of(model: ModelConfig, tp: int) -> ModelConfig:
    """Returns a model of the size that one of `tp` devices holds of the given model.

    Raises:
      ConfigError: The model has experts.
    """
    if model.experts is not None:
        raise ConfigError("--alone is not implemented for models with experts; omit it.")
    layout = model_layout(model, tp)
    groups = layout.num_groups // tp
    return dataclasses.replace(
        model,
        num_kv_heads=groups,
        num_query_heads=groups * layout.group_size,
        mlp_dim=layout.mlp_dim // tp,
        vocab_size=layout.vocab_size // tp,
    )


def _time_model(options: argparse.Namespace, name: str, model: ModelConfig, tp: int) -> Iterator[Step]:
    """Yields the timed step of each batch size."""
    mesh = make_mesh(tp)
    structure, params = random_params(model, mesh, expert_parallel=options.expert_parallel)
    for batch in options.batch:
        kernels = _kernels(options, model, mesh, batch)
        compiling = time.perf_counter()
        runner, packed = make_runner(options, model, mesh, kernels, batch=batch, made=(structure, params))
        compile_seconds = time.perf_counter() - compiling
        run = partial(runner.run, bucket_of(batch), packed)
        with PowerWatch() as power:
            started = time.perf_counter()
            times, dispatch_ms = time_steps(run, options.rounds, options.steps)
            ended = time.perf_counter()
        median, p10, p90 = (float(np.percentile(times, q)) for q in (50, 10, 90))
        yield Step(
            model=name, tp=tp, batch=batch, context=options.context, step_ms=median, p10_ms=p10, p90_ms=p90,
            dispatch_ms=dispatch_ms, compile_seconds=compile_seconds, power=power.between(started, ended),
        )  # fmt: skip
        if options.profile and (tp, batch) == (options.tp[-1], options.batch[-1]):
            print(_kernel_table(options.profile, run, num_steps=options.steps, num_devices=tp))
        runner.release()


def _kernel_table(folder: Path, run: Callable[[], object], *, num_steps: int, num_devices: int) -> str:
    """Returns the kernels of one step on one device, averaged over all devices."""
    with jax.profiler.trace(str(folder)):
        for _ in range(num_steps):
            output = run()
        jax.block_until_ready(output)
    return kernel_table(folder, num_steps=num_steps * num_devices)


def bucket_of(batch: int) -> Bucket:
    """Returns the bucket of a batch of greedy decodes."""
    return Bucket(batch, batch, batch, is_decode=True, mode=SamplingMode.GREEDY)


def _state_shapes(
    options: argparse.Namespace, model: ModelConfig, tp: int, batch: int
) -> DeviceState[jax.ShapeDtypeStruct]:
    num_pages = -(-options.context // options.page_size)
    shape = CacheShape(batch * num_pages, options.page_size, batch, num_pages)
    return state_shapes(model, model_layout(model, tp), shape, _DTYPE)


def make_runner(
    options: argparse.Namespace,
    model: ModelConfig,
    mesh: Mesh,
    kernels: Kernels,
    *,
    batch: int,
    made: tuple[nnx.GraphDef, nnx.State] | None = None,
) -> tuple[StepRunner, np.ndarray]:
    """Returns the started runner of a batch's decode, with random parameters and a page table, and its packed input."""
    structure, params = made or random_params(model, mesh)
    bucket = bucket_of(batch)
    shapes = _state_shapes(options, model, mesh.size, batch)
    programs = ServerPrograms(
        structure=structure, params=params, mesh=mesh, buckets=[bucket], kernels=kernels,
        state=placed_state(shapes, mesh),
    )  # fmt: skip
    runner = programs.compile_runner()
    runner.start(params)
    fill_cache(runner, mesh)
    num_pages = shapes.page_table.shape[1]
    for row in range(batch):
        runner.set_page_row(np.array([row, *range(row * num_pages, (row + 1) * num_pages)], np.int32))
    return runner, decode_batch(bucket, options.context)


def fill_cache(runner: StepRunner, mesh: Mesh) -> None:
    """Fills the cache of a started runner with random keys and values.

    With zeros, all requests of a batch would decode the same tokens, and a GPU that a large batch keeps at its power
    limit would need less power, and so less time.
    """
    cache = runner._state.cache
    block = cache.sharding.shard_shape(cache.shape)
    cache.delete()
    make = partial(_random_block, block, _CACHE_SEED)
    runner._state = runner._state._replace(cache=_on_each_device(make, mesh, CACHE_AXES))


def decode_batch(bucket: Bucket, context: int) -> np.ndarray:
    """Packs a step in which each request greedily decodes token number `context`, on pages that it already has."""
    packed = np.zeros(bucket.size, np.int32)
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    fields["token_ids"][:] = ON_DEVICE
    fields["positions"][:] = context - 1
    for name in ("token_request", "slots", "last_index"):
        fields[name][:] = np.arange(bucket.num_requests)
    fields["top_p"][:] = np.float32(1.0).view(np.int32)
    fields["sample_position"][:] = context
    fields["page_slot"][:] = bucket.num_requests  # out of range: no new page table entries
    return packed


def random_params(model: ModelConfig, mesh: Mesh, *, expert_parallel: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes random parameters on the devices: norms are ones, all other weights have random signs and mantissas.

    The values are spread about as widely as trained weights. Each device makes its own block, which takes seconds where
    `random_weights` takes minutes. Models with experts get those of `random_weights`, which choose experts evenly.
    """
    layout = model_layout(model, mesh.size, expert_parallel=expert_parallel)
    if model.experts is not None:
        return random_model(model, layout, mesh, _DTYPE)
    structure, abstract = abstract_model(model, layout, _DTYPE)
    flat = []
    for seed, (path, weight) in enumerate(nnx.to_flat_state(abstract)):
        block = named_sharding(mesh, weight.axes).shard_shape(weight.shape)
        make = partial(_ones if "norm" in path[-1] else _random_block, block, seed)
        flat.append((path, weight.replace(_on_each_device(make, mesh, weight.axes))))
    return structure, nnx.from_flat_state(flat)


def _on_each_device(make: Callable[[], jax.Array], mesh: Mesh, axes: Sequence[str | None]) -> jax.Array:
    """Makes an array of which each device computes its own block."""
    spec = partition_spec(tuple(axes))
    return jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()


def _ones(shape: tuple[int, ...], _: int) -> jax.Array:
    return jnp.ones(shape, _DTYPE)


def _random_block(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Makes random values part by part, because the generator needs twice the memory of its output."""
    rank = jax.lax.axis_index(TENSOR_AXIS).astype(jnp.uint32)

    def make(part: jax.Array) -> jax.Array:
        key = jnp.stack([jnp.uint32(seed), rank, part, jnp.uint32(2)])
        _, bits = jax.lax.rng_bit_generator(key, (shape[0] // num_parts, *shape[1:]), jnp.uint16)
        return jax.lax.bitcast_convert_type((bits & 0x807F) | 0x3C80, _DTYPE)

    num_parts = math.gcd(shape[0], 64)
    return jax.lax.map(make, jnp.arange(num_parts, dtype=jnp.uint32)).reshape(shape)


def with_efficiency(steps: Sequence[Step]) -> list[Step]:
    """Sets the efficiency of each step relative to the smallest TP size of the same model and batch."""
    smallest: dict[tuple[str, int], Step] = {}
    for step in sorted(steps, key=lambda step: step.tp):
        smallest.setdefault((step.model, step.batch), step)
    return [
        dataclasses.replace(step, efficiency=base.tp * base.step_ms / (step.tp * step.step_ms))
        for step in steps
        for base in (smallest[step.model, step.batch],)
    ]


def plot(steps: Sequence[Step], path: Path) -> None:
    """Plots the milliseconds per step over the TP size, one line per model and batch; ideal scaling is dotted.

    Raises:
      SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}): install meshserve[plots].") from None

    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    for key in dict.fromkeys((step.model, step.batch) for step in steps):
        line = [step for step in steps if (step.model, step.batch) == key]
        tp_sizes = [step.tp for step in line]
        (drawn,) = axes.plot(tp_sizes, [step.step_ms for step in line], "o-", label=f"{key[0]}, batch {key[1]}")
        ideal = [line[0].step_ms * line[0].tp / tp_size for tp_size in tp_sizes]
        axes.plot(tp_sizes, ideal, ":", color=drawn.get_color())
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms a step", xticks=sorted({step.tp for step in steps}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
