"""Finds the sampling thresholds on an NVIDIA GPU: see ../cuda/sampling/threshold.cuh.

One thread block handles each request, with three passes over its logits for top-p alone and five for all filters. The
result is exact and bitwise reproducible.
"""

from functools import partial

import jax
import jax.numpy as jnp

from meshserve.kernels.cuda import build, support

from .contract import SamplingImplementation

MAX_VOCAB = (1 << 18) - 1  # limited by the width of the integer sums


def find_threshold(
    logits: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """See `FindThreshold`.

    Raises:
      ValueError: the vocabulary is larger than MAX_VOCAB.
      KernelBuildError: the kernels cannot be compiled or loaded.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"the vocabulary has {logits.shape[1]} tokens; the kernel takes at most {MAX_VOCAB}")
    build.load(build.present())
    threshold = jax.ShapeDtypeStruct(logits.shape[:1], jnp.uint32)
    return jax.ffi.ffi_call("meshserve_sampling_threshold", threshold)(logits, temperature, top_k, top_p, min_p)


def _unsupported_size(vocab_size: int) -> str | None:
    return None if vocab_size <= MAX_VOCAB else f"the vocabulary has {vocab_size} tokens; at most {MAX_VOCAB}"


IMPLEMENTATION = SamplingImplementation(
    name="cuda",
    unsupported_device=support.no_ampere,
    unsupported_shapes=_unsupported_size,
    unavailable_reason=partial(build.unbuildable_reason, None),
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    find_threshold=find_threshold,
)
