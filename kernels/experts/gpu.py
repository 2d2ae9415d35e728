"""Experts on an NVIDIA Hopper GPU, in bfloat16: see ../cuda/experts_launch.cuh.

Two sets of kernels, both of which read the experts that were chosen and no other. For at most 8 tokens, warps load the
weights to registers and add up a token's experts in a single pass. For more, the tokens are copied in order of their
experts, multiplied in tiles of at most 128 tokens of one expert, and added up. Which tokens chose which expert is found
on the device, and launches depend on shapes alone, so that a step can be captured in a command buffer.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build

if TYPE_CHECKING:
    from . import ExpertWeights, Routing

unavailable_reason = build.unavailable_reason

FEW_TOKENS = 8  # of a step on the kernels for few tokens, at most; above, the others are faster (docs/log/experts.md)
_MAX_EXPERTS = 256  # of a block


def experts(
    x: jax.Array,
    weights: "ExpertWeights",
    routing: "Routing",
    *,
    layer: int | jax.Array,
    num_experts: int,
    most_few_tokens: int = FEW_TOKENS,
) -> jax.Array:
    """See `Experts`. `most_few_tokens` is for benchmarks and tests.

    Raises:
      TypeError: `layer` is not a Python number; it is a compile-time constant.
      ValueError: a shape or dtype is not supported.
      KernelBuildError: the kernels cannot be compiled or loaded.
    """
    del num_experts
    if isinstance(layer, jax.Array):
        raise TypeError("layer is an array; the CUDA kernels need a Python number: unroll the layers")
    reason = unsupported_reason(weights) or (f"x is {x.dtype}; bfloat16 is needed" if x.dtype != jnp.bfloat16 else None)
    if reason is not None:
        raise ValueError(f"moe_backend 'cuda': {reason}. Use 'xla'.")
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), scratch(x.shape[0], routing.experts.shape[1], weights))
    out, _ = jax.ffi.ffi_call("meshserve_experts", results)(
        x, *weights, *routing, layer=np.int32(layer), most_few_tokens=np.int32(most_few_tokens)
    )
    return out


in_tiles = partial(experts, most_few_tokens=0)  # also steps of few tokens, for tests and benchmarks


def scratch(num_tokens: int, num_chosen: int, weights: "ExpertWeights") -> jax.ShapeDtypeStruct:
    """Returns the shape of the scratch memory of a layer's experts."""
    embed, mlp = weights.down.shape[2:]
    num_bytes = build.load().meshserve_expert_scratch_bytes(num_tokens, num_chosen, embed, mlp)
    return jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)


def unsupported_reason(weights: "ExpertWeights") -> str | None:
    """Returns why the kernels do not support these shapes or dtypes, or None if they do. No array is read."""
    _, num_local, embed, mlp = weights.down.shape
    checks = (
        (num_local <= _MAX_EXPERTS, f"a device has {num_local} experts; {_MAX_EXPERTS} are supported"),
        (embed % 128 == 0, f"the embedding size is {embed}; a multiple of 128 is needed"),
        (mlp % 32 == 0, f"the intermediate size per device is {mlp}; a multiple of 32 is needed"),
        (
            weights.gate_up.dtype == weights.down.dtype == jnp.bfloat16,
            f"the experts are {weights.down.dtype}; bfloat16 is needed",
        ),
    )
    return next((reason for holds, reason in checks if not holds), None)
