"""Tests the CUDA kernels of mixed steps against float64 on a GPU, in a cache full of NaN."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionImplementation,
    PagedBatch,
    cases,
    sm80,
    write_kv,
)
from meshserve.kernels.paged_attention.context_split import by_remainder, held_by, merged, packed, seen_by

from .comparing import assert_has_values

BOUND = 5e-3  # limit of ||out - expected|| / ||expected||; bfloat16 rounding of weights and result alone: 2e-3 to 3e-3
CASES = (
    *(
        case
        for case in cases.CASES
        if case.dtype == "bfloat16" and not case.cache_dtype and case.num_kv_tokens <= 40_000
    ),
    *cases.MATRIX_CASES,
    *(dataclasses.replace(case, name=f"{case.name}-fp8", cache_dtype="float8_e4m3fn") for case in cases.MATRIX_CASES),
)


@pytest.fixture(scope="module", params=["cuda", "portable"])
def kernel(request: pytest.FixtureRequest) -> AttentionImplementation:
    library = build.HOPPER if request.param == "cuda" else build.PORTABLE
    if (reason := build.unavailable_reason(library=library)) is not None:
        pytest.skip(reason)
    return IMPLEMENTATIONS[request.param]


@partial(jax.jit, static_argnames=("kernel", "layer", "scale"))
def write_and_attend(q, k, v, cache, batch, *, kernel, layer, scale):
    cache = write_kv(cache, k, v, batch, layer=layer)
    return cache, kernel.attend(q, cache, batch, layer=layer, scale=scale)


def run(kernel: AttentionImplementation, inputs: cases.Inputs) -> tuple[np.ndarray, np.ndarray]:
    arrays = (inputs.q, inputs.k, inputs.v, inputs.cache)
    settings = {"kernel": kernel, "layer": inputs.layer, "scale": inputs.scale}
    cache, attended = write_and_attend(*arrays, inputs.batch, **settings)
    return np.asarray(cache), np.asarray(attended)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_the_float64_computation(kernel, case):
    """The cache contains only the requests' own keys and values and NaN, and no NaN reaches the result."""
    inputs = cases.make_inputs(case, seed=1)
    _, attended = run(kernel, inputs)
    expected = cases.expected_attention(inputs)
    attended = attended.astype(np.float64)
    is_padding = np.asarray(inputs.batch.positions) < 0
    if not case.is_zero:
        assert_has_values(expected[~is_padding])
    np.testing.assert_array_equal(attended[is_padding], 0.0)
    assert np.isfinite(attended).all()
    error = np.linalg.norm((attended - expected)[~is_padding], axis=-1)
    size = np.linalg.norm(expected[~is_padding], axis=-1)
    assert (error <= 4 * BOUND * size).all()
    assert np.linalg.norm(error) <= BOUND * np.linalg.norm(size)


@partial(jax.jit, static_argnames=("kernel", "num_parts", "layer", "scale"))
def write_and_attend_in_parts(q, k, v, caches, batch, *, kernel, num_parts, layer, scale):  # noqa: PLR0913
    moved = by_remainder(batch, num_parts)
    q, k, v, results = q[moved.order], k[moved.order], v[moved.order], []
    for part in range(num_parts):
        cache = write_kv(caches[part], k, v, held_by(moved.batch, part, num_parts), layer=layer)
        seen = seen_by(moved.batch, part, num_parts)
        results.append(packed(*kernel.attend_part(q, cache, seen, layer=layer, scale=scale), seen))
    return merged(jnp.stack(results), q.shape[-1], q.dtype)[moved.places]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_merged_parts_of_the_keys_are_attention_to_all_keys(kernel, case):
    num_parts = 2
    if case.page_size % (16 * num_parts):
        pytest.skip("the kernel needs pages of a multiple of 16 tokens")
    inputs = cases.make_inputs(case, seed=1)
    arrays = (inputs.q, inputs.k, inputs.v, cases.divided(inputs.cache, num_parts), inputs.batch)
    attended = write_and_attend_in_parts(
        *arrays, kernel=kernel, num_parts=num_parts, layer=inputs.layer, scale=inputs.scale
    )
    expected, attended = cases.expected_attention(inputs), np.asarray(attended).astype(np.float64)
    assert np.isfinite(attended).all()
    assert np.linalg.norm(attended - expected) <= 1.5 * BOUND * np.linalg.norm(expected)


def test_more_query_heads_than_a_call_can_have(kernel):
    case = cases.Case(name="", requests=((1, 70), (40, 90)), group=16, head_dim=128, page_size=32, dtype="bfloat16")
    inputs = cases.make_inputs(case, seed=1)
    arrays = (jnp.asarray(array) for array in (inputs.cache, inputs.k, inputs.v))
    cache = write_kv(*arrays, inputs.batch, layer=inputs.layer)
    q = jnp.asarray(inputs.q)
    attended, sums = kernel.attend_part(q, cache, inputs.batch, layer=inputs.layer, scale=inputs.scale)
    expected = cases.expected_attention(inputs)
    assert_has_values(expected)
    assert sums.shape == q.shape[:3]
    assert np.linalg.norm(np.asarray(attended).astype(np.float64) - expected) <= BOUND * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "name", ["more-tiles-than-blocks", "block-borders-group-4", "head-64-page-128", "parts-of-chunks"]
)
def test_the_same_bits_again(kernel, name):
    """There are no races, and the rest of the cache has no effect."""
    inputs = cases.make_inputs(next(case for case in CASES if case.name == name), seed=2)
    _, expected = run(kernel, inputs)
    assert_has_values(cases.expected_attention(inputs)[np.asarray(inputs.batch.positions) >= 0])
    for garbage in (np.nan, np.inf, 0.0, -3e38):
        cache = np.where(np.isnan(inputs.cache.astype(np.float32)), np.float32(garbage), inputs.cache)
        _, attended = run(kernel, dataclasses.replace(inputs, cache=cache.astype(inputs.cache.dtype)))
        np.testing.assert_array_equal(attended, expected)


def test_a_token_does_not_depend_on_the_rest_of_its_step(kernel):
    """Computes tokens whole, in chunks, and with others; the bits are the same if a tile begins at the same token."""
    case = cases.Case(
        name="", requests=((384, 384), (1, 500)), kv_heads=2, group=4, head_dim=128, page_size=64, dtype="bfloat16"
    )
    inputs = cases.make_inputs(case, seed=3)
    cache, whole = run(kernel, inputs)
    assert_has_values(whole)
    for first, last in ((0, 128), (128, 384), (352, 384), (384, 385)):
        if kernel is sm80.IMPLEMENTATION and sm80.tile_rows(last - first, 2, case.group) != sm80.tile_rows(884, 2, 4):
            continue  # other tiles
        batch = PagedBatch(
            inputs.batch.positions[first:last], inputs.batch.token_request[first:last], inputs.batch.page_table
        )
        part = kernel.attend(
            jnp.asarray(inputs.q[first:last]), jnp.asarray(cache), batch, layer=inputs.layer, scale=inputs.scale
        )
        np.testing.assert_array_equal(np.asarray(part), whole[first:last])


def test_padding_between_decodes(kernel):
    case = cases.Case(
        name="", requests=((1, 70),) * 6, kv_heads=2, group=2, head_dim=128, page_size=32, dtype="bfloat16"
    )
    inputs = cases.make_inputs(case, seed=4)
    cache, whole = run(kernel, inputs)
    is_padding = np.array([0, 1, 0, 0, 1, 1], bool)
    batch = inputs.batch._replace(positions=jnp.where(is_padding, -1, inputs.batch.positions))
    arguments = (jnp.asarray(inputs.q), jnp.asarray(cache), batch)
    out = np.asarray(kernel.attend(*arguments, layer=inputs.layer, scale=inputs.scale))
    assert_has_values(whole[~is_padding])
    np.testing.assert_array_equal(out[~is_padding], whole[~is_padding])
    assert not out[is_padding].any()


def test_a_donated_cache_is_written_in_place(kernel):
    inputs = cases.make_inputs(cases.MATRIX_CASES[0], seed=5)

    @partial(jax.jit, donate_argnums=3)
    def step(q, k, v, cache):
        attended = jnp.zeros_like(q)
        for layer in range(cache.shape[0]):
            cache = write_kv(cache, k, v, inputs.batch, layer=layer)
            attended += kernel.attend(q, cache, inputs.batch, layer=layer, scale=inputs.scale)
        return cache, attended

    arrays = [jnp.asarray(array) for array in (inputs.q, inputs.k, inputs.v, inputs.cache)]
    text = step.lower(*arrays).compile().as_text()
    shape = "bf16[" + ",".join(map(str, inputs.cache.shape)) + "]"
    assert not [line for line in text.splitlines() if " copy(" in line and shape in line.split("copy(")[0]]
    before = arrays[-1].unsafe_buffer_pointer()
    cache, _ = step(*arrays)
    assert cache.unsafe_buffer_pointer() == before
