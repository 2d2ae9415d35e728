"""Tests the reference paged attention against a float64 computation, case by case, in a cache full of NaN."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.paged_attention import cases, implementation, reference, write_kv

from .comparing import assert_has_values

SMALL = [case for case in cases.CASES if case.num_kv_tokens <= 400]
MIXED = next(case for case in cases.CASES if case.name == "decodes-beside-chunks")


def every_small_case(test):
    return pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)(test)


@partial(jax.jit, static_argnames=("layer", "scale"))
def write_and_attend(q, k, v, cache, batch, *, layer, scale):
    cache = write_kv(cache, k, v, batch, layer=layer)
    return cache, reference.paged_attention(q, cache, batch, layer=layer, scale=scale)


def run(inputs: cases.Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cache and the attention of a step."""
    arrays = (inputs.q, inputs.k, inputs.v, inputs.cache)
    cache, attended = write_and_attend(*arrays, inputs.batch, layer=inputs.layer, scale=inputs.scale)
    return np.asarray(cache), np.asarray(attended)


@every_small_case
def test_the_cache_gets_each_key_and_value_and_nothing_else(case):
    inputs = cases.make_inputs(case, seed=1)
    cache, _ = run(inputs)
    assert cache.dtype == inputs.cache.dtype
    np.testing.assert_array_equal(cache.astype(np.float32), cases.expected_cache(inputs).astype(np.float32))


@every_small_case
def test_attention_is_the_float64_computation(case):
    """The cache contains only the requests' own keys and values and NaN, and no NaN reaches the result."""
    inputs = cases.make_inputs(case, seed=1)
    _, attended = run(inputs)
    expected = cases.expected_attention(inputs)
    assert attended.dtype == inputs.q.dtype
    attended = attended.astype(np.float64)
    is_padding = np.asarray(inputs.batch.positions) < 0
    np.testing.assert_array_equal(attended[is_padding], 0.0)
    if not case.is_zero:
        assert_has_values(expected[~is_padding])
    error = np.abs(attended - expected)
    if case.dtype == "float32":
        assert np.linalg.norm(error) <= 1e-5 * np.linalg.norm(expected)
    else:  # computed in float32, rounded once: half a unit in the last of 8 bits
        assert (error <= 2.0**-8 * np.abs(expected) + 1e-5).all()


@pytest.mark.parametrize("garbage", [0.0, np.inf, -3e38])
def test_what_lies_elsewhere_in_the_cache_changes_no_bit(garbage):
    inputs = cases.make_inputs(MIXED, seed=2)
    _, expected = run(inputs)
    other = dataclasses.replace(inputs, cache=np.where(np.isnan(inputs.cache), np.float32(garbage), inputs.cache))
    _, attended = run(other)
    assert_has_values(expected)
    np.testing.assert_array_equal(attended, expected)


def test_large_scores_do_not_overflow():
    inputs = cases.make_inputs(MIXED, seed=3)
    inputs = dataclasses.replace(inputs, q=inputs.q * 1e4)
    _, attended = run(inputs)
    expected = cases.expected_attention(inputs)
    # A score of 1e5 has an error of 1e-2 in float32, which decides some near ties, but most weights are 0 or 1 anyway.
    assert np.isfinite(attended).all()
    assert np.mean(np.isclose(attended, expected, atol=1e-3)) > 0.9


def test_the_layer_may_be_an_argument_of_the_program():
    inputs = cases.make_inputs(MIXED, seed=4)
    _, expected = run(inputs)
    attend = jax.jit(partial(reference.paged_attention, scale=inputs.scale))
    attended = attend(inputs.q, cases.expected_cache(inputs), inputs.batch, layer=jnp.int32(inputs.layer))
    assert_has_values(expected)
    np.testing.assert_array_equal(attended, expected)


class CountingCache:
    """A cache that counts how often pages are gathered from it."""

    def __init__(self, cache: np.ndarray):
        self.shape, self.dtype = cache.shape, cache.dtype
        self.num_gathers = 0
        self._cache = jnp.asarray(cache)

    def __getitem__(self, place):
        self.num_gathers += 1
        return self._cache[place]


@pytest.mark.parametrize(
    ("requests", "num_pages"),
    [
        (((1, 1), (1, 1)), 1),
        (((1, 16), (1, 1)), 1),
        (((1, 17), (1, 16)), 2),
        (((1, 2), (1, 33)), 3),
        (((0, 0), (0, 0)), 0),
    ],
    ids=str,
)
def test_no_more_pages_are_gathered_than_the_longest_request_owns(requests, num_pages):
    """Holds for any width of the page table, which is that of the longest context; loops run in Python and are
    counted.
    """
    num_padding = 4 - sum(num_new for num_new, _ in requests)
    inputs = cases.make_inputs(cases.Case(name="", requests=requests, num_padding_tokens=num_padding), seed=5)
    page_table = jnp.pad(inputs.batch.page_table, ((0, 0), (0, 8 - inputs.batch.page_table.shape[1])))
    batch = inputs.batch._replace(page_table=page_table)
    cache = CountingCache(cases.expected_cache(inputs))
    with jax.disable_jit():
        attended = reference.paged_attention(
            jnp.asarray(inputs.q), cache, batch, layer=inputs.layer, scale=inputs.scale
        )
    assert cache.num_gathers == num_pages
    if num_pages:  # otherwise no request has a token
        assert_has_values(attended)
    np.testing.assert_allclose(attended, cases.expected_attention(inputs), atol=1e-5)


def test_inputs_are_what_the_cases_promise():
    """Pages are in random order, every request has its own, and the rest is NaN."""
    inputs = cases.make_inputs(MIXED, seed=6)
    owned = [
        page
        for (_, total), row in zip(MIXED.requests, np.asarray(inputs.batch.page_table), strict=True)
        for page in row[: -(-total // MIXED.page_size)].tolist()
    ]
    assert len(set(owned)) == len(owned) and owned != sorted(owned)
    written = cases.expected_cache(inputs)[inputs.layer]
    num_places = np.isfinite(written).sum() // (2 * MIXED.kv_heads * MIXED.head_dim)
    assert num_places == MIXED.num_kv_tokens
    assert np.isnan(np.delete(written, owned, axis=0)).all()


def test_an_implementation_that_cannot_run_here_says_why():
    assert implementation("reference") is reference.paged_attention
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="'cuda' cannot run: .*cpu"):
        implementation("cuda")


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="'fast'; this build has cuda, portable, tpu, reference"):
        implementation("fast")
