"""Tests the P2P kernels on one Hopper GPU whose streams act as ranks (p2p_on_one_gpu.cu), without a second GPU."""

import ctypes
import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.decode_layers import cases, reference

from .comparing import assert_has_values

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BOUND = 1e-2  # limit of ||out - reference|| / ||reference||, as on one device


class Shapes(ctypes.Structure):
    """Mirrors the struct in step_shapes.cuh."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in "layers batch embed kv_heads group head_dim mlp pages page_size max_pages".split()
    ]


class Ranks(ctypes.Structure):
    """Mirrors the struct in p2p_on_one_gpu.cu."""

    _fields_ = [
        ("num", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in "weights caches xs page_table positions inverse_frequencies".split()),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, nvcc = tmp_path_factory.mktemp("one_gpu"), build.find_nvcc()
    assert nvcc is not None
    units = [*build.sources(), Path(__file__).parent / "p2p_on_one_gpu.cu"]
    build.compile_library(nvcc, units, folder, folder / "mesh.so")
    return ctypes.CDLL(str(folder / "mesh.so"))


def pointers(arrays: list[jax.Array]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*(array.unsafe_buffer_pointer() for array in jax.block_until_ready(arrays)))


def address(array: ctypes.Array) -> int:
    return ctypes.addressof(array)


def cut(name: str, array: jax.Array, num: int) -> list[jax.Array]:
    dimension = cases.CUT_DIMENSIONS.get(name)
    parts = [array] * num if dimension is None else jnp.split(array, num, axis=dimension)
    return [jnp.array(part, copy=True) for part in parts]


CASES = [
    dataclasses.replace(case, kv_heads=4, mlp=512, embed=256)
    for case in cases.CASES
    if case.name in ("one-token", "page-borders", "padding-rows", "batch-16", "batch-30")
]
# Only one layer: waiting blocks of a second layer's attention would leave no room for the rank they wait for. A batch
# of 128 deadlocks even in the first layer, and needs two GPUs.
CASES += [
    dataclasses.replace(case, kv_heads=4, mlp=512, embed=256, num_layers=1)
    for case in cases.CASES
    if case.name == "batch-64"
]


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_over_ranks_are_the_layers_on_one_device(library: ctypes.CDLL, case: cases.Case, num: int) -> None:
    inputs = cases.make_inputs(case, seed=3, dtype=jnp.bfloat16)
    dense = {name: array for name, array in inputs.weights._asdict().items() if array is not None}
    by_weight = [cut(name, array, num) for name, array in dense.items()]
    weights = [parts[rank] for rank in range(num) for parts in by_weight]
    caches, xs = cut("cache", inputs.cache, num), cut("x", inputs.x, num)
    outs = [jnp.full_like(inputs.x, jnp.nan) for _ in range(num)]
    held = [pointers(arrays) for arrays in (weights, caches, xs, outs)]
    layers, pages, _, _, page_size, head_dim = inputs.cache.shape
    table, positions, frequencies = jax.block_until_ready((*reversed(inputs.batch), inputs.inverse_frequencies))
    ranks = Ranks(
        num, *map(address, held[:3]), *(array.unsafe_buffer_pointer() for array in (table, positions, frequencies))
    )
    shapes = Shapes(
        layers, *inputs.x.shape, case.kv_heads // num, case.group, head_dim, case.mlp // num, pages, page_size,
        table.shape[1],
    )  # fmt: skip
    settings = inputs.settings
    floats = map(ctypes.c_float, (settings.epsilon, settings.softmax_scale, settings.rotary_scale))
    error = ctypes.create_string_buffer(200)
    status = library.run_layers(ctypes.byref(ranks), ctypes.byref(shapes), *floats, held[3], 25, error, 200)
    assert status == 0, error.value

    rows = [np.array(jnp.array(out, copy=True), np.float32) for out in outs]
    real = np.asarray(positions) >= 0
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    exact = jax.device_put(arguments, jax.devices("cpu")[0])
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, exact)
    expected, expected_cache, _ = jax.jit(partial(reference.decode_layers, settings=settings))(*exact)
    out, expected, before = (np.asarray(a, np.float64)[real] for a in (rows[0], expected, inputs.x))
    assert relative_error(out, expected) < BOUND
    assert relative_error(out - before, expected - before) < 2 * BOUND
    cache = np.concatenate([np.asarray(jnp.array(part, copy=True), np.float32) for part in caches], axis=2)
    written = np.isnan(np.asarray(inputs.cache, np.float32)) & ~np.isnan(np.asarray(expected_cache))
    assert relative_error(cache[written], np.asarray(expected_cache)[written]) < BOUND


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    assert_has_values(expected)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("is_one_shot", [True, False], ids=["one-shot", "two-shots"])
@pytest.mark.parametrize(("kilobytes", "repeats"), [(4, 3000), (10, 500), (64, 300), (512, 60), (2048, 9), (16384, 3)])
def test_all_reduce_is_the_float32_sum(
    library: ctypes.CDLL, kilobytes: int, repeats: int, is_one_shot: bool, num: int
) -> None:
    if is_one_shot and kilobytes > 2048:
        pytest.skip("one shot has slots of 2 MB")
    if not is_one_shot and num > 4:
        pytest.skip("two shots are built for 2 and 4")
    shares = np.random.default_rng(1).standard_normal((num, repeats, kilobytes * 512), np.float32)
    shares = jnp.asarray(shares, jnp.bfloat16)
    sums = jnp.full_like(shares, jnp.nan)
    error = ctypes.create_string_buffer(200)
    if is_one_shot:
        status = run_one_shots(library, shares, sums, kilobytes * 128, is_sum=True, error=error)
    else:
        jax.block_until_ready((shares, sums))
        addresses = (ctypes.c_void_p(array.unsafe_buffer_pointer()) for array in (shares, sums))
        status = library.run_two_shots(num, kilobytes * 64 // num, repeats, *addresses, error, 200)
    assert status == 0, error.value
    wide = np.asarray(shares, np.float32)
    expected = wide[0].copy()
    for share in wide[1:]:
        expected += share
    expected = np.asarray(jnp.asarray(expected).astype(jnp.bfloat16), np.float32)
    for rank in range(num):
        np.testing.assert_array_equal(np.asarray(jnp.array(sums, copy=True), np.float32)[rank], expected)


def test_all_gather(library: ctypes.CDLL) -> None:
    num, repeats, pairs = 4, 200, 17
    draw = np.random.default_rng(2).integers(-(2**31), 2**31 - 1, (num, repeats, pairs * 2), np.int32)
    got = jnp.zeros((num, repeats, num, pairs * 2), jnp.int32)
    error = ctypes.create_string_buffer(200)
    status = run_one_shots(library, jnp.asarray(draw), got, pairs, is_sum=False, error=error)
    assert status == 0, error.value
    expected = np.where(draw == -1, 0x7FFF7FFF, draw).swapaxes(0, 1)  # [repeats, num, words]
    for rank in range(num):
        np.testing.assert_array_equal(np.asarray(jnp.array(got, copy=True))[rank], expected)


def run_one_shots(
    library: ctypes.CDLL, sent: jax.Array, got: jax.Array, pairs: int, *, is_sum: bool, error: ctypes.Array
) -> int:
    num, repeats = sent.shape[:2]
    jax.block_until_ready((sent, got))
    addresses = (ctypes.c_void_p(array.unsafe_buffer_pointer()) for array in (sent, got))
    return library.run_one_shots(num, pairs, repeats, int(is_sum), *addresses, error, 200)
