"""Runs the TPU kernels in Pallas' interpreter on 4 virtual devices; tests start it as a separate process.

The interpreter's callbacks wait for each other. With as few threads as a small machine has cores they deadlock, so the
process must be started with NPROC=16 in its environment (seen with jax 0.10.2 on 2 cores).

    NPROC=16 python -m tests.kernels.interpret_tpu cases NAME...     # one line of JSON per case
    NPROC=16 python -m tests.kernels.interpret_tpu faults
    NPROC=16 python -m tests.kernels.interpret_tpu split
    NPROC=16 python -m tests.kernels.interpret_tpu divided NAME...   # over pages that devices divide
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch, cases, tpu, tpu_body, tpu_write
from meshserve.kernels.paged_attention.context_split import by_remainder, held_by, merged, packed, seen_by
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh, use_cpu_devices

from .comparing import assert_has_values

NUM_DEVICES = 4
# jax 0.12 raises on races that earlier versions only counted.
ON_RACE = {"on_race": "warn"} if "on_race" in {f.name for f in dataclasses.fields(pltpu.InterpretParams)} else {}
CHECKED = pltpu.InterpretParams(detect_races=True, **ON_RACE)  # a copy completes when it is awaited, at the latest
EAGER = dataclasses.replace(
    CHECKED, dma_execution_mode="eager"
)  # copies complete at once, so a race is reported as such
FAULTS = ("none", "no_wait", "no_wait_eager", "wrong_page", "out_of_bounds")


def run(
    inputs: list[cases.Inputs], interpret: pltpu.InterpretParams = CHECKED, **options: object
) -> tuple[np.ndarray, np.ndarray]:
    """Writes and attends, each device with the KV heads of its own inputs; returns caches and results per device."""
    mesh = make_mesh(NUM_DEVICES)
    batch = inputs[0].batch
    layer, scale = inputs[0].layer, inputs[0].scale

    def block(q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = tpu_write.write_kv(cache[0], k[0], v[0], batch, layer=layer, interpret=interpret)
        out = tpu.paged_attention(q[0], cache, batch, layer=layer, scale=scale, interpret=interpret, **options)
        return cache[None], out[None]

    stacked = [jnp.stack([getattr(one, name) for one in inputs]) for name in ("q", "k", "v", "cache")]
    each = PartitionSpec(TENSOR_AXIS)
    program = jax.shard_map(block, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    return tuple(np.asarray(array).astype(np.float64) for array in jax.jit(program)(*stacked))


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)


def check(case: cases.Case) -> dict[str, object]:
    """Checks a case; every device has its own values, but the same pages, as in the server."""
    first = cases.make_inputs(case, seed=1)
    rng = np.random.default_rng(2)
    inputs = [first]
    for _ in range(NUM_DEVICES - 1):
        fresh = {
            name: rng.standard_normal(getattr(first, name).shape, np.float32).astype(getattr(first, name).dtype)
            for name in ("q", "k", "v")
        }
        inputs.append(dataclasses.replace(first, **fresh))
    caches, outs = run(inputs)
    error, is_cache_right = 0.0, True
    for one, cache, out in zip(inputs, caches, outs, strict=True):
        expected = cases.expected_attention(one)
        error = max(error, float(np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-30)))
        is_padding = np.asarray(one.batch.positions) < 0
        if not case.is_zero:
            assert_has_values(expected[~is_padding])
        assert (out[is_padding] == 0).all()
        is_cache_right &= np.array_equal(cache, cases.expected_cache(one).astype(np.float64), equal_nan=True)
    return {"case": case.name, "error": error, "is_cache_right": is_cache_right, "races": races_found()}


MIXED = cases.Case(name="mixed", requests=((1, 40), (1, 3), (12, 30)), kv_heads=1)
TILING = tpu_body.Tiling(items=2, block_pages=1, slots=3, tile_tokens=4, tile_pages=1)


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """Removes the waits for page copies."""
    with mock.patch.object(tpu_body.Kernel, "_await_pages", lambda *_: None):
        yield


@contextlib.contextmanager
def wrong_page() -> Iterator[None]:
    """Copies the page after the correct one."""
    copy = tpu_body.Kernel._copy_pages
    with mock.patch.object(
        tpu_body.Kernel, "_copy_pages", lambda self, token, start, *rest: copy(self, token, start + 1, *rest)
    ):
        yield


def fault(name: str) -> dict[str, object]:
    """Injects a fault and returns what it caused."""
    inputs = cases.make_inputs(MIXED, seed=1)
    if name == "out_of_bounds":
        table = np.where(np.arange(3) == 1, inputs.cache.shape[1], np.asarray(inputs.batch.page_table))
        inputs = dataclasses.replace(inputs, batch=PagedBatch(*inputs.batch[:2], jnp.asarray(table, jnp.int32)))
    planted = {"no_wait": no_wait, "no_wait_eager": no_wait, "wrong_page": wrong_page}.get(name, contextlib.nullcontext)
    with planted():
        try:
            _, outs = run([inputs] * NUM_DEVICES, EAGER if name == "no_wait_eager" else CHECKED, tiling=TILING)
        except Exception as error:  # jax wraps the interpreter's IndexError in other types
            return {"fault": name, "raised": str(error)}
    expected = cases.expected_attention(inputs) if name != "out_of_bounds" else np.zeros_like(outs[0])
    is_right = bool(np.allclose(outs[0], expected, atol=1e-4))
    return {"fault": name, "is_right": is_right, "races": races_found()}


def split(num_table_rows: int) -> dict[str, object]:
    """Runs chunks before decodes, with padding between them, and `num_table_rows` rows of the page table per call."""
    case = cases.Case(name="split", requests=((5, 20), (1, 9), (1, 3), (3, 17)), kv_heads=1)
    inputs = cases.make_inputs(case, seed=3)
    positions = np.array(inputs.batch.positions)
    positions[6] = -1  # the second single token
    inputs = dataclasses.replace(inputs, batch=inputs.batch._replace(positions=jnp.asarray(positions)))
    tiling = dataclasses.replace(TILING, table_bytes=num_table_rows * 4 * inputs.batch.page_table.shape[1])
    _, outs = run([inputs] * NUM_DEVICES, tiling=tiling)
    expected = cases.expected_attention(inputs)
    error = float(np.linalg.norm(outs[0] - expected) / np.linalg.norm(expected))
    return {"rows": num_table_rows, "error": error, "races": races_found()}


def divided(case: cases.Case) -> dict[str, object]:
    """Checks a case in which every second device holds the same half of each page."""
    inputs = cases.make_inputs(case, seed=1)
    halves = cases.divided(inputs.cache, 2)
    moved = by_remainder(inputs.batch, 2)
    q, k, v = (jnp.asarray(array)[moved.order] for array in (inputs.q, inputs.k, inputs.v))

    def block(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.axis_index(TENSOR_AXIS) % 2
        held, seen = held_by(moved.batch, part, 2), seen_by(moved.batch, part, 2)
        cache = tpu_write.write_kv(cache[0], k, v, held, layer=inputs.layer, interpret=CHECKED)
        result = tpu.partial_attention(q, cache, seen, layer=inputs.layer, scale=inputs.scale, interpret=CHECKED)
        return cache[None], packed(*result, seen)[None]

    each, mesh = PartitionSpec(TENSOR_AXIS), make_mesh(NUM_DEVICES)
    program = jax.shard_map(block, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    caches, results = jax.jit(program)(jnp.stack([halves[device % 2] for device in range(NUM_DEVICES)]))
    expected_caches, expected = cases.divided(cases.expected_cache(inputs), 2), cases.expected_attention(inputs)
    error, is_cache_right = 0.0, True
    for first in range(0, NUM_DEVICES, 2):
        out = merged(results[first : first + 2], inputs.q.shape[-1], jnp.asarray(inputs.q).dtype)[moved.places]
        error = max(error, float(np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)))
        for device in (first, first + 1):
            is_cache_right &= np.array_equal(
                np.asarray(caches[device], np.float64), expected_caches[device % 2].astype(np.float64), equal_nan=True
            )
    return {"case": case.name, "error": error, "is_cache_right": is_cache_right, "races": races_found()}


def main() -> None:
    use_cpu_devices(NUM_DEVICES)
    if sys.argv[1] == "faults":
        for name in FAULTS:
            print(json.dumps(fault(name)), flush=True)
        return
    if sys.argv[1] == "split":
        for num_table_rows in (2, 4):
            print(json.dumps(split(num_table_rows)), flush=True)
        return
    by_name = {case.name: case for case in cases.CASES}
    checked = divided if sys.argv[1] == "divided" else check
    for name in sys.argv[2:]:
        print(json.dumps(checked(by_name[name])), flush=True)


if __name__ == "__main__":
    main()
