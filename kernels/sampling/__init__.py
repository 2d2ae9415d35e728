"""What the filters of sampling leave of a row of logits, where one device has the whole vocabulary.

A logit's key is its float32's bits as a uint32 that sorts as the logits do: all bits flipped where it is negative, else
the sign set; -0.0 counts as 0.0. The filters are min-p, then top-k of what is left, then top-p of what is left, each
keeping equals together, so that what a row keeps is told by one key, the least of them.
"""

from typing import Protocol

import jax

from . import gpu


class FindThreshold(Protocol):
    """An implementation."""

    def __call__(
        self, logits: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
    ) -> jax.Array:
        """Args: logits [B, V] float32; of each row [B]: temperature and top_p float32 (1 is off), top_k int32 (0 is
        off), min_p float32 (0 is off), see `runtime.request.SamplingParams`.

        Returns [B] uint32: tokens with this key and above are kept; 0, all, for rows of temperature 0.
        """
        ...


def implementation(device: jax.Device, vocab_size: int) -> FindThreshold | None:
    """The kernel for a device and a vocabulary, or None where there is none."""
    is_there = gpu.unavailable_reason(device) is None and vocab_size <= gpu.MAX_VOCAB
    return gpu.find_threshold if is_there else None
