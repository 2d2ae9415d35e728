"""Experts on an NVIDIA Hopper GPU, with activations in bfloat16: see ../cuda/experts/sm90/launch.cuh.

Two sets of kernels, both of which read the experts that were chosen and no other. For few tokens, warps stream rows of
weights through shared memory and add up a token's experts in a single pass; the embedding size must be 2,048 or 4,096.
Otherwise, the tokens are copied in order of their experts, multiplied in tiles of one expert's tokens, and added up.
Which tokens chose which expert is found on the device, and launches depend on shapes alone, so that a step can be
captured in a command buffer.

Weights may be 8-bit floats with a scale for each block of 128 x 128. For few tokens they are converted in registers. In
tiles, activations are rounded to 8-bit floats with a scale for each token and 128 columns, as for dense products, and
the FP8 tensor cores multiply them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, support
from meshserve.kernels.implementation import Cost
from meshserve.kernels.linear import E4M3, QuantizedMatrix

from .contract import ExpertShapes, ExpertsImplementation, ExpertStep, ExpertWeights, Routing, least_cost

# The most tokens of a step by rows of weights; the kernels hold no more, and are faster (docs/log/experts.md).
FEW_TOKENS = 8
_MAX_EXPERTS = 256  # per block
_FP8_BLOCK = 128  # rows and columns that share a scale
_MAX_FP8_COLUMNS = 8192  # a warp holds the scales of a row, a lane those of twice 128 columns


def experts(
    x: jax.Array,
    weights: ExpertWeights,
    routing: Routing,
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
    call = jax.ffi.ffi_call("meshserve_experts" if weights.quantized is None else "meshserve_experts_fp8", results)
    out, _ = call(x, *operands(weights), *routing, layer=np.int32(layer), most_few_tokens=np.int32(most_few_tokens))
    return out


in_tiles = partial(experts, most_few_tokens=0)  # also steps of few tokens, for tests and benchmarks


def operands(weights: ExpertWeights) -> tuple[jax.Array, ...]:
    """Returns the weights as operands of a call: quantized ones are three each, the scales in place of zero points."""
    parts: list[jax.Array] = []
    for stack in weights:
        parts += (stack.data, stack.scale, stack.scale) if isinstance(stack, QuantizedMatrix) else (stack,)
    return tuple(parts)


def scratch(num_tokens: int, num_chosen: int, weights: ExpertWeights) -> jax.ShapeDtypeStruct:
    """Returns the shape of the scratch memory of a layer's experts."""
    embed, mlp = weights.down.shape[2:]
    num_bytes = build.load().meshserve_expert_scratch_bytes(num_tokens, num_chosen, embed, mlp)
    return jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)


def unsupported_reason(weights: ExpertWeights) -> str | None:
    """Returns why the kernels do not support these shapes or dtypes, or None if they do. No array is read."""
    _, num_local, embed, mlp = weights.down.shape
    checks = (
        (num_local <= _MAX_EXPERTS, f"a device has {num_local} experts; {_MAX_EXPERTS} are supported"),
        (embed % 128 == 0, f"the embedding size is {embed}; a multiple of 128 is needed"),
        (mlp % 32 == 0, f"the intermediate size per device is {mlp}; a multiple of 32 is needed"),
        (
            weights.quantized is not None or weights.gate_up.dtype == weights.down.dtype == jnp.bfloat16,
            f"the experts are {weights.down.dtype}; bfloat16 or float8_e4m3fn is needed",
        ),
    )
    reason = next((reason for holds, reason in checks if not holds), None)
    return reason or next(filter(None, map(_unsupported_fp8, weights.quantized or ())), None)


def _unsupported_fp8(matrix: QuantizedMatrix) -> str | None:
    """Returns why the kernels do not support a quantized matrix, or None if they do."""
    if matrix.format != E4M3:
        return f"the experts are {matrix.format.name}; bfloat16 or float8_e4m3fn is needed"
    if matrix.block != (_FP8_BLOCK, _FP8_BLOCK):
        return f"a scale of the experts covers {matrix.block}; blocks of {_FP8_BLOCK} x {_FP8_BLOCK} are needed"
    if matrix.shape[-1] > _MAX_FP8_COLUMNS:
        return f"experts have {matrix.shape[-1]} columns; at most {_MAX_FP8_COLUMNS} are supported in 8 bits"
    return None


def unsupported_shapes(shapes: ExpertShapes) -> str | None:
    """Returns why the kernels cannot serve experts and the dtype of their tokens, or None if they can."""
    if reason := unsupported_reason(shapes.weights):
        return reason
    return None if shapes.dtype == jnp.bfloat16 else f"activations are {shapes.dtype}; bfloat16 is needed"


def cost(shapes: ExpertShapes, step: ExpertStep) -> Cost:
    """Estimates the cost. Only in tiles are tokens rounded to 8 bits where the experts have them."""
    found = least_cost(shapes, step)
    if shapes.weights.quantized is None or step.num_tokens <= FEW_TOKENS:
        return found
    return Cost(num_bytes=found.num_bytes, fp8_operations=found.operations)


IMPLEMENTATION = ExpertsImplementation(
    name="cuda",
    unsupported_device=support.no_hopper,
    unsupported_shapes=unsupported_shapes,
    unavailable_reason=build.unbuildable_reason,
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    reached=0.5,  # prompts of 30B-A3B, with the router (docs/log/experts.md)
    fp8_reached=0.28,
    experts=experts,
    cost=cost,
)
