"""The filters of sampling on an NVIDIA Hopper GPU: see ../cuda/floor.cuh.

A block of threads a row, three passes over it for top-p, five for all filters. Exact, and the same bits every time.
"""

import jax
import jax.numpy as jnp

from meshserve.kernels.cuda import build

unavailable_reason = build.unavailable_reason
MAX_VOCAB = (1 << 18) - 1  # sums over a row are whole numbers, which have room for so many


def find_threshold(
    logits: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """See `FindThreshold`.

    Raises:
      ValueError: the vocabulary is larger than MAX_VOCAB.
      KernelBuildError: not a Hopper GPU, or the kernels cannot be compiled.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"the vocabulary has {logits.shape[1]} tokens; the kernel takes {MAX_VOCAB}")
    build.load()
    threshold = jax.ShapeDtypeStruct(logits.shape[:1], jnp.uint32)
    return jax.ffi.ffi_call("meshserve_sampling_floor", threshold)(logits, temperature, top_k, top_p, min_p)
