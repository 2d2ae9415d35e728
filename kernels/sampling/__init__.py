"""Finds the threshold of the min-p, top-k and top-p filters when one device holds the whole vocabulary.

A logit's key is the bits of its float32 as a uint32 that sorts like the logits: all bits are flipped if the logit is
negative, else the sign bit is set; -0.0 counts as 0.0. The filters run in the order min-p, top-k, top-p, each on the
tokens that remain, and each keeps or drops equal logits together. One key per request therefore describes the result:
the smallest key that is kept.
"""

from typing import Protocol

import jax

from . import gpu


class FindThreshold(Protocol):
    """The interface of an implementation."""

    def __call__(
        self, logits: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
    ) -> jax.Array:
        """Returns each request's threshold. `runtime.api.sampling_params.SamplingParams` describes the parameters.

        Args:
          logits: [B, V] float32.
          temperature: [B] float32.
          top_k: [B] int32; 0 is off.
          top_p: [B] float32; 1 is off.
          min_p: [B] float32; 0 is off.

        Returns:
          [B] uint32. Tokens with this key or a larger one are kept; 0 keeps all, as for requests of temperature 0.
        """
        ...


def implementation(device: jax.Device, vocab_size: int) -> FindThreshold | None:
    """Returns the kernel for a device and vocabulary size, or None if there is none."""
    is_there = gpu.unavailable_reason(device) is None and vocab_size <= gpu.MAX_VOCAB
    return gpu.find_threshold if is_there else None
