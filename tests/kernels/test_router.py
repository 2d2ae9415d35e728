"""Tests the router's definition against a float64 computation, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.router import RouterOptions
from meshserve.kernels.router.reference import route

from .comparing import assert_has_values


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_shares_are_a_softmax_over_all_experts(num_chosen: int, is_normalized: bool) -> None:
    rng = np.random.default_rng(num_chosen)
    x, router = rng.standard_normal((5, 16)), rng.standard_normal((7, 16))
    positions = jnp.array([4, 0, -1, 2, 9])
    options = RouterOptions(num_chosen=num_chosen, is_normalized=is_normalized)
    experts, shares = route(jnp.asarray(x, jnp.float32), jnp.asarray(router, jnp.float32), options, positions)
    for token in (0, 1, 3, 4):
        weights = np.exp(router @ x[token])
        best = np.argsort(-weights)[:num_chosen]
        expected = weights[best] / (weights[best] if is_normalized else weights).sum()
        assert_has_values(expected)
        np.testing.assert_array_equal(experts[token], best)
        np.testing.assert_allclose(shares[token], expected, rtol=1e-5)
    np.testing.assert_array_equal(experts[2], -1)


def test_equal_scores_choose_the_lower_expert() -> None:
    options = RouterOptions(num_chosen=2, is_normalized=True)
    experts, shares = route(jnp.ones((1, 4)), jnp.ones((6, 4)), options)
    np.testing.assert_array_equal(experts, [[0, 1]])
    np.testing.assert_allclose(shares, [[0.5, 0.5]])
