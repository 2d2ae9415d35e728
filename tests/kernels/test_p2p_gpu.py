"""Tests all-reduces and layers over meshes of 2 and 4 P2P-connected Hopper GPUs against the same on one device.

One test starts another process, so memory must be left free: run with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import dataclasses
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels.cuda import build
from meshserve.kernels.decode_layers import cases
from meshserve.kernels.decode_layers import reference as layers_reference
from meshserve.kernels.decode_layers import sm90_calls as sm90
from meshserve.kernels.p2p import P2PGroup, reference
from meshserve.kernels.p2p import sm90 as p2p_sm90
from meshserve.kernels.p2p.cases import shares_of, wrong_elements
from tests.waiting import WAIT_SECONDS

from .comparing import assert_has_values
from .mesh_layers import AXIS, layers_over, mesh_of, placed

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PATIENCE_SECONDS = 8.0
BOUND = 1e-2  # limit of ||out - reference|| / ||reference||, as on one device
KILOBYTES = (4, 8, 10, 64, 320, 512, 1024, 2048, 2112, 8192, 33000)  # above 2048 with two shots


@pytest.fixture(params=[4, 2], ids=["on-4", "on-2"], scope="module")
def mesh(request: pytest.FixtureRequest) -> Mesh:
    if len(jax.devices()) < request.param:
        pytest.skip(f"this machine has {len(jax.devices())} GPUs")
    return mesh_of(jax.devices()[: request.param])


@pytest.fixture(scope="module")
def p2p(mesh: Mesh) -> P2PGroup:
    return p2p_sm90.open_p2p_group(AXIS, list(mesh.devices.flat), patience_seconds=PATIENCE_SECONDS)


def over(mesh: Mesh, function, num_results: int = 1):
    """Runs the function on every device with its rank and returns the stacked results."""
    out = PartitionSpec(AXIS)
    specs = out if num_results == 1 else (out,) * num_results
    ranks = jnp.arange(mesh.size, dtype=jnp.int32)
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=out, out_specs=specs, check_vma=False))
    return program(ranks)


@pytest.mark.parametrize("kilobytes", KILOBYTES)
def test_all_reduce_is_the_rounded_float64_sum(mesh: Mesh, p2p: P2PGroup, kilobytes: int) -> None:
    num_elements = kilobytes * 512

    def both(rank: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = shares_of(rank[0], kilobytes, num_elements)
        return x[None], p2p_sm90.p2p_all_reduce(x, p2p)[None]

    shares, sums = (np.asarray(a, np.float64) for a in over(mesh, both, 2))
    exact = shares.sum(axis=0)
    assert_has_values(exact)
    assert np.abs(sums - exact).max() <= np.abs(exact).max() * 2**-8
    assert np.linalg.norm(sums[0] - exact) <= 2**-8 * np.linalg.norm(exact)
    for row in sums[1:]:
        np.testing.assert_array_equal(row, sums[0])


@pytest.mark.parametrize("kilobytes", [8, 64, 512, 4096])
def test_thousands_of_all_reduces_are_right(mesh: Mesh, p2p: P2PGroup, kilobytes: int) -> None:
    """Compares every element on the device with the sum of what all ranks drew, bit for bit."""
    add = partial(p2p_sm90.p2p_all_reduce, p2p=p2p)
    count = wrong_elements(mesh, add, num_elements=kilobytes * 512, tolerance=0.0, num_sums=3000)
    assert not np.asarray(count(0)).any()


@pytest.mark.parametrize("num_elements", [256, 3 << 20])
def test_words_that_look_like_an_empty_slot_arrive(mesh: Mesh, p2p: P2PGroup, num_elements: int) -> None:
    def add(rank: jax.Array) -> jax.Array:
        bits = jnp.where(jnp.arange(num_elements) % 3 == 0, 0xFFFF, 0x3F80).astype(jnp.uint16)
        return p2p_sm90.p2p_all_reduce(jax.lax.bitcast_convert_type(bits, jnp.bfloat16), p2p)[None]

    out = np.asarray(over(mesh, add), np.float32)
    assert np.isnan(out[:, ::3]).all()
    assert (out[:, 1::3] == mesh.size).all()


def test_all_gather(mesh: Mesh, p2p: P2PGroup) -> None:
    def both(rank: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = (jnp.arange(34, dtype=jnp.int32).reshape(17, 2) + 1) * (1 - 2 * rank[0]) - 1 - (rank[0] == 0)
        return p2p_sm90.p2p_all_gather(x, p2p)[None], reference.p2p_all_gather(x, p2p)[None]

    got, expected = (np.asarray(a) for a in over(mesh, both, 2))
    np.testing.assert_array_equal(got[:, expected[0] != -1], expected[:, expected[0] != -1])


CASES = [
    *(case for case in cases.CASES if case.name == "qwen3-0.6b-layer"),
    *(
        dataclasses.replace(case, kv_heads=4, mlp=512)
        for case in cases.CASES
        if case.name in ("page-borders", "padding-rows", "batch-16", "batch-30", "batch-64", "batch-128")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_over_a_mesh_are_the_layers_on_one_device(mesh: Mesh, p2p: P2PGroup, case: cases.Case) -> None:
    inputs = cases.make_inputs(case, seed=3, dtype=jnp.bfloat16)
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    real = np.asarray(inputs.batch.positions) >= 0
    program = layers_over(mesh, sm90, inputs, p2p)
    on_mesh = placed(inputs, mesh)
    rows, cache = program(*on_mesh)
    rows = np.asarray(rows, np.float32).reshape(mesh.size, *inputs.x.shape)
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])
    for _ in range(20):  # repetitions give the same bits
        again, _ = program(*on_mesh)
        np.testing.assert_array_equal(np.asarray(again, np.float32).reshape(rows.shape), rows)

    exact = jax.device_put(arguments, jax.devices("cpu")[0])
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, exact)
    expected, expected_cache, _ = jax.jit(partial(layers_reference.decode_layers, settings=inputs.settings))(*exact)
    out, expected, before = (np.asarray(a, np.float64)[real] for a in (rows[0], expected, inputs.x))
    assert relative_error(out, expected) < BOUND
    assert relative_error(out - before, expected - before) < 2 * BOUND
    written = np.isnan(np.asarray(inputs.cache, np.float32)) & ~np.isnan(np.asarray(expected_cache))
    got_cache, want_cache = (np.asarray(a, np.float32)[written] for a in (cache, expected_cache))
    assert relative_error(got_cache, want_cache) < BOUND


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    assert_has_values(expected)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


LOST = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from meshserve.kernels.p2p import sm90
mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
p2p = sm90.open_p2p_group("x", jax.devices()[:2], patience_seconds=1.0)
add = lambda x: sm90.p2p_all_reduce(x, p2p)
absent = lambda x: jax.lax.cond(jax.lax.axis_index("x") == 1, lambda x: x, add, x)
run = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("x"), check_vma=False))
print(np.asarray(run(add)(jnp.ones(256, jnp.bfloat16)), np.float32)[0], flush=True)
try:
    jax.block_until_ready(run(absent)(jnp.ones(256, jnp.bfloat16)))
except jax.errors.JaxRuntimeError as error:
    print("failed:", str(error).splitlines()[0][:200], flush=True)
print(sm90.timeouts(), flush=True)
"""


def test_a_lost_device_is_an_error_and_not_a_hang() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("this machine has one GPU")
    done = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.stdout.startswith("2.0"), done.stderr[-3000:]
    assert "failed:" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "P2P timeout: GPU 0 waited for GPU 1" in done.stdout
