"""Finds the threshold of the min-p, top-k and top-p filters when one device holds the whole vocabulary.

A logit's key is the bits of its float32 as a uint32 that sorts like the logits: all bits are flipped if the logit is
negative, else the sign bit is set; -0.0 counts as 0.0. The filters run in the order min-p, top-k, top-p, each on the
tokens that remain, and each keeps or drops equal logits together. One key per request therefore describes the result:
the smallest key that is kept.
"""

import jax

from meshserve.kernels.implementation import Device, choose, in_order

from . import cuda
from .contract import FindThreshold, SamplingImplementation

__all__ = ["IMPLEMENTATIONS", "FindThreshold", "SamplingImplementation", "implementation"]

# In order of preference; without any of them, steps search with operations of XLA (runtime.program.sampling).
IMPLEMENTATIONS = in_order(cuda.IMPLEMENTATION)


def implementation(device: jax.Device, vocab_size: int) -> FindThreshold | None:
    """Returns the kernel for a device and vocabulary size, or None if there is none."""
    found = choose(IMPLEMENTATIONS, Device.of(device), vocab_size, is_present=True).implementation
    return None if found is None else found.find_threshold
