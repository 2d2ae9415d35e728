"""Tests that attention over parts of the keys, merged, is attention over all keys, in caches full of NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.paged_attention import cases, reference, write_kv
from meshserve.kernels.paged_attention.context_split import by_remainder, held_by, merged, packed, seen_by

from .comparing import assert_has_values

SMALL = [case for case in cases.CASES if case.num_kv_tokens <= 400]


@partial(jax.jit, static_argnames=("num_parts", "layer", "scale"))
def write_and_attend(q, k, v, caches, batch, *, num_parts, layer, scale):
    moved = by_remainder(batch, num_parts)
    q, k, v, results = q[moved.order], k[moved.order], v[moved.order], []
    for part in range(num_parts):
        caches[part] = write_kv(caches[part], k, v, held_by(moved.batch, part, num_parts), layer=layer)
        seen = seen_by(moved.batch, part, num_parts)
        attended = reference.partial_attention(q, caches[part], seen, layer=layer, scale=scale)
        results.append(packed(*attended, seen))
    return caches, merged(jnp.stack(results), q.shape[-1], q.dtype)[moved.places]


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_merged_parts_are_the_float64_computation(case, num_parts):
    if case.page_size % num_parts:
        pytest.skip("each part holds the same number of a page's tokens")
    inputs = cases.make_inputs(case, seed=1)
    arrays = (inputs.q, inputs.k, inputs.v, cases.divided(inputs.cache, num_parts), inputs.batch)
    caches, attended = write_and_attend(*arrays, num_parts=num_parts, layer=inputs.layer, scale=inputs.scale)
    for cache, expected in zip(caches, cases.divided(cases.expected_cache(inputs), num_parts), strict=True):
        np.testing.assert_array_equal(np.asarray(cache, np.float32), expected.astype(np.float32))
    expected = cases.expected_attention(inputs)
    assert attended.dtype == inputs.q.dtype
    is_padding = np.asarray(inputs.batch.positions) < 0
    attended = np.asarray(attended).astype(np.float64)
    np.testing.assert_array_equal(attended[is_padding], 0.0)
    if not case.is_zero:
        assert_has_values(expected[~is_padding])
    tolerance = 1e-5 if case.dtype == "float32" else 2.0**-7  # parts are rounded to 8 bits before they are merged
    assert np.linalg.norm(attended - expected) <= tolerance * np.linalg.norm(expected)


def test_each_request_becomes_requests_at_consecutive_rows():
    """What the kernels require: consecutive tokens of a request see one row more each."""
    case = cases.Case(name="", requests=((1, 9), (7, 50), (2, 4), (16, 16)), num_padding_tokens=3)
    batch = cases.make_inputs(case, seed=1).batch
    for num_parts in (2, 3, 4):
        moved = by_remainder(batch, num_parts)
        np.testing.assert_array_equal(np.asarray(moved.order)[np.asarray(moved.places)], np.arange(29))
        assert (np.asarray(moved.batch.positions)[-3:] == -1).all(), "padding comes last"
        for part in range(num_parts):
            seen = seen_by(moved.batch, part, num_parts)
            requests, rows = np.asarray(seen.token_request)[:-3], np.asarray(seen.positions)[:-3]
            is_same = requests[1:] == requests[:-1]
            assert (rows[1:][is_same] == rows[:-1][is_same] + 1).all()
            assert (np.diff(requests) >= 0).all()
