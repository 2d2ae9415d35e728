"""Tells whether a test of a kernel compares anything: zeros equal zeros whatever the kernel computes."""

import numpy as np
from numpy.typing import ArrayLike

_LEAST_SHARE = 0.25  # of the values; the rest may be padding


def assert_has_values(expected: ArrayLike, least_share: float = _LEAST_SHARE) -> None:
    """Fails unless enough of the expected values are numbers other than zero."""
    values = np.asarray(expected).astype(np.float32)
    num_values = np.count_nonzero((values != 0) & ~np.isnan(values))
    assert num_values > 0, f"none of the {values.size} expected values is a number other than zero"
    assert num_values >= least_share * values.size, f"only {num_values} of {values.size} expected values are not zero"
