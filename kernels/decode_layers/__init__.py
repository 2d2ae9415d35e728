"""Runs the layers of a decode step on one device's block: a few new tokens, a range of layers in one call.

A Qwen3 layer is: RMSNorm, projection to query, key and value, RMSNorm of every query and key head, rotary position
embedding (half split), writing key and value to the token's page, attention over the request's positions so far, output
projection and residual, RMSNorm, silu(gate) * up, down projection and residual. Norm statistics, softmax and sums use
float32. With experts, the last part is a router and `kernels.experts`.

`decode_layers` does all of this. On a mesh, the results of the `output` and `down` projections are summed over the
devices by the P2P all-reduce within the call. For devices without peer access, its five parts are available one layer
at a time: `qkv`, `attention`, `output`, `gate_up`, `down`. Layers with experts run on one device only.

Dimensions: L layers, D embed, K kv heads of this block, G query heads per kv head, H head dim, F mlp of this block,
P pages, S page size (tokens per page), B requests.
"""

import dataclasses

import jax

from meshserve.kernels.implementation import in_order, named

from . import reference, sm90
from .contract import (
    DecodeBatch,
    DecodeImplementation,
    DecodeKernels,
    DecodeShapes,
    LayerSettings,
    LayerWeights,
    unsupported_layers,
)

__all__ = [
    "IMPLEMENTATIONS",
    "DecodeBatch",
    "DecodeImplementation",
    "DecodeKernels",
    "DecodeShapes",
    "LayerSettings",
    "LayerWeights",
    "implementation",
]


def _max_tokens(shapes: DecodeShapes) -> int:
    return sm90.max_tokens(dataclasses.replace(shapes, has_fp8_products=False))


# The reference runs about the steps that Hopper's kernels run, on any backend, for tests. It is chosen by name only.
_REFERENCE = DecodeImplementation(
    name="reference",
    unsupported_shapes=unsupported_layers,
    kernels=reference,
    cost=sm90.cost,
    max_tokens=_max_tokens,
    max_prompt_tokens=sm90.max_prompt_tokens,
)
# In order of preference; without any of them, layers are not fused.
IMPLEMENTATIONS = in_order(sm90.IMPLEMENTATION, _REFERENCE)


def implementation(name: str, device: jax.Device | None = None) -> DecodeKernels:
    """Returns the kernels of a named implementation. See `kernels.implementation.named` for the errors."""
    return named(IMPLEMENTATIONS, "decode_layers", name, device).kernels
