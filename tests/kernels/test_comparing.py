"""Tests that comparisons of nothing are found."""

import numpy as np
import pytest

from .comparing import assert_has_values


@pytest.mark.parametrize("expected", [np.zeros(8), np.zeros((0, 4)), np.full(3, np.nan), [0.0] * 9 + [1.0]])
def test_zeros_are_nothing_to_compare(expected):
    with pytest.raises(AssertionError, match="expected values"):
        assert_has_values(expected)


def test_a_quarter_is_enough():
    assert_has_values([0.0, 0.0, 0.0, -1.0])
    assert_has_values([0.0] * 9 + [1.0], least_share=0.1)


def test_warnings_of_numpy_are_errors():
    nothing = np.linalg.norm(np.zeros(4))
    with pytest.raises(RuntimeWarning, match="invalid value"):
        nothing / nothing
