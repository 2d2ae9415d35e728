"""Attention of a ragged batch over a paged KV cache, on one device's block.

The tokens of a step are concatenated request by request. A request has one token (a decode) or several (a prefill
chunk), and a step may mix both. First each token's key and value are written to the cache, then every token attends to
the positions of its request up to its own.

Dimensions: T tokens, B requests, K kv heads of this block, G query heads per kv head, H head dim, L layers, P pages,
S page size (tokens per page).
"""

import jax

from meshserve.kernels.implementation import in_order, named

from . import reference, sm80, sm90, tpu
from .contract import (
    AttentionImplementation,
    AttentionShapes,
    AttentionStep,
    PagedAttention,
    PagedBatch,
    PartialAttention,
    QKNormRope,
    RopeSettings,
    WriteKV,
)
from .reference import write_kv

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionImplementation",
    "AttentionShapes",
    "AttentionStep",
    "PagedAttention",
    "PagedBatch",
    "PartialAttention",
    "QKNormRope",
    "RopeSettings",
    "WriteKV",
    "implementation",
    "write_kv",
]

# In order of preference: cuda (Hopper, bfloat16), portable (NVIDIA GPUs since Ampere, bfloat16), tpu, reference (any
# backend), and tpu_interpreted (the TPU kernel in Pallas' interpreter, which checks its copies; runs on any backend,
# for tests, thousands of times slower).
IMPLEMENTATIONS = in_order(
    sm90.IMPLEMENTATION, sm80.IMPLEMENTATION, tpu.IMPLEMENTATION, reference.IMPLEMENTATION, tpu.INTERPRETED
)


def implementation(name: str, device: jax.Device | None = None) -> PagedAttention:
    """Returns the attention of a named implementation. See `kernels.implementation.named` for the errors."""
    return named(IMPLEMENTATIONS, "attention", name, device).attend
