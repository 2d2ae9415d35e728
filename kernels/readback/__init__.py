"""Contract of the zero-copy readback of sampled tokens through pinned host memory.

A step has a number. Its program passes the tokens through a `TokenReadback`, and `PendingTokens` on the host wait for
those of that number. An implementation serves programs of one device. Without one, or for steps of number 0, tokens are
copied like any array of the device.
"""

from meshserve.kernels.implementation import in_order

from . import cuda
from .contract import ReadbackImplementation, TokenReadback

__all__ = ["IMPLEMENTATIONS", "ReadbackImplementation", "TokenReadback"]

# In order of preference.
IMPLEMENTATIONS = in_order(cuda.IMPLEMENTATION)
