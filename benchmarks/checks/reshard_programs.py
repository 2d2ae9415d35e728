"""Compiles the programs of a weight update for TPU slices, without having one: part of `check_tpu`.

    python -m meshserve.benchmarks.checks.reshard_programs

A trainer's arrays, sharded over all devices as with FSDP, are gathered, and become the parameters of a server whose TP
size is the whole slice. Every program must compile and fit beside two copies of the weights, and stacks of layers must
be written in place.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshserve.benchmarks.lib.trainer_trees import FORMS, fully_sharded
from meshserve.runtime.plan.aot import DryServer
from meshserve.runtime.weight_updates.assembly import layers_of, lowered_writers, shape_of_layer
from meshserve.runtime.weight_updates.named_arrays import NamedArrays
from meshserve.sharding.memory import added_bytes, shard_bytes

from . import check_programs

MODELS = ("qwen3-8b", "qwen3-30b-a3b")
TARGETS = ("v5e:2x4", "v6e:2x4")
_FORMS_OF = {"qwen3-8b": ("hugging_face", "tunix", "maxtext"), "qwen3-30b-a3b": ("tunix", "fused_experts")}
_LARGE_BYTES = 1 << 20  # smaller stacks may be copied


def check(models: Sequence[str], slice_name: str) -> list[str]:
    """Compiles the programs of each model and form for a slice, prints a line for each and returns what went wrong."""
    faults = []
    for model in models:
        plan = check_programs.planner(model, slice_name)
        dry = DryServer.on(plan.target, plan.server)
        for form in _FORMS_OF.get(model, ("tunix",)):
            found, num_programs, most_bytes = [], 0, 0
            weight_bytes = shard_bytes(dry.server.abstract_params()[1])
            for what, old, lowered in _programs(dry, form):
                compiled = lowered.compile()
                memory = compiled.memory_analysis()
                assert memory is not None
                needed = added_bytes(compiled) + memory.argument_size_in_bytes
                num_programs, most_bytes = num_programs + 1, max(most_bytes, added_bytes(compiled))
                stack_bytes = shard_bytes(old) if old is not None else 0
                if stack_bytes > max(_LARGE_BYTES, memory.alias_size_in_bytes):
                    found.append(f"{what} copies a stack of {stack_bytes / 1e6:.0f} MB")
                if 2 * weight_bytes + needed - stack_bytes > dry.target.chip.hbm_bytes:
                    found.append(f"{what} needs {needed / 1e9:.1f} GB beside two copies of the weights")
            print(f"{slice_name}: {model}, {form}: {num_programs} programs of an update compile; they add at most "
                  f"{most_bytes / 1e6:.0f} MB to each device; {len(found)} faults", flush=True)  # fmt: skip
            faults += [f"{slice_name}: {model}, {form}: {fault}" for fault in found]
    return faults


def _programs(dry: DryServer, form: str) -> Iterator[tuple[str, jax.ShapeDtypeStruct | None, jax.stages.Lowered]]:
    """Yields the name, the parameter that is written, if it is a stack, and each program."""
    server = dry.server
    table = FORMS[form](server.model)
    assert table is not None
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in table.shapes.items()}
    named = NamedArrays(table, arrays)  # type: ignore[arg-type]
    pieces = table.pieces(server.model, server.layout)
    for path, variable in nnx.to_flat_state(server.abstract_params()[1]):
        name, old = ".".join(map(str, path)), variable.get_value()
        layers = layers_of(name, server.model, pieces[name], named)
        for lowered in lowered_writers(old, layers, arrays):
            yield f"writing {name}", old if layers[0].row is not None else None, lowered
    yield from _gathers(server.mesh, {shape_of_layer(table.shapes[view.array], view) for view in table.views.values()})


def _gathers(mesh: Mesh, shapes: Iterable[tuple[int, ...]]) -> Iterator[tuple[str, None, jax.stages.Lowered]]:
    """Yields for each shape the program that brings an array, or a layer of a stack, to every device."""
    devices = Mesh(np.array(mesh.devices).reshape(-1), ("fsdp",))
    for shape in sorted(shapes):
        given = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=fully_sharded(shape, devices))
        gather = jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))
        yield f"gathering {list(shape)}", None, gather.lower(given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and returns 1 if any expectation fails."""
    parser = check_programs.parser("Compile the programs of weight updates.", models=MODELS, targets=TARGETS)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    return check_programs.verdict([fault for each in options.targets for fault in check(options.models, each)])


if __name__ == "__main__":
    sys.exit(main())
