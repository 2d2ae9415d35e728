"""Experts on NVIDIA GPUs since Ampere, with activations in bfloat16: see ../cuda/experts/sm80/schedule.cuh.

Two sets of kernels, both of which read the experts that were chosen and no other. For few tokens, warps stream rows of
weights through shared memory and add up a token's experts in a single pass. Otherwise, the tokens of an expert are
multiplied in tiles, whose number of tokens follows from how many an expert gets on average, and then added up. Which
tokens chose which expert is found on the device, and launches depend on shapes alone, so that a step can be captured
in a command buffer.

Weights in 8 or 4 bits are converted to bfloat16 in registers, without rounding; scales are applied to float32 sums.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, support
from meshserve.kernels.linear import E4M3, INT4, Format, Matrix, QuantizedMatrix

from .contract import ExpertShapes, ExpertsImplementation, ExpertWeights, Routing, least_cost

NAME = "portable"
FEW_TOKENS = 64  # the most tokens of a step by rows of weights, with up to 8 choices each
FORMATS: tuple[Format, ...] = (E4M3, INT4)  # formats of quantized experts
_MAX_EXPERTS = 256  # per block
_EMBED_MULTIPLE = 128
_MLP_MULTIPLE: dict[Format | None, int] = {None: 32, E4M3: 64, INT4: 32}
_LEAST_GROUP: dict[Format, int] = {E4M3: 64, INT4: 32}  # columns with a scale
_SCALE_DTYPES = ("float32", "bfloat16", "float16")
_NUMBERS: dict[Format | None, int] = {None: 0, E4M3: 1, INT4: 2}  # WeightFormat in schedule.cuh


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

    A token's result depends on how many others there are, but not on what they are.

    Raises:
      TypeError: `layer` is not a Python number; it is a compile-time constant.
      ValueError: a shape or dtype is not supported.
      KernelBuildError: the kernels cannot be compiled or loaded.
    """
    if isinstance(layer, jax.Array):
        raise TypeError("layer is an array; the CUDA kernels need a Python number: unroll the layers")
    reason = unsupported_reason(weights) or (f"x is {x.dtype}; bfloat16 is needed" if x.dtype != jnp.bfloat16 else None)
    if reason is not None:
        raise ValueError(f"moe_backend {NAME!r}: {reason}. Use 'xla'.")
    (num_tokens, embed), num_chosen, num_local = x.shape, routing.experts.shape[1], weights.down.shape[1]
    num_bytes = build.load(build.PORTABLE).meshserve_tile_expert_scratch_bytes(
        num_tokens, num_chosen, num_local, embed, weights.down.shape[3], _NUMBERS[_format_of(weights.down)]
    )
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((num_bytes,), jnp.uint8))
    out, _ = jax.ffi.ffi_call("meshserve_tile_experts", results)(
        x,
        *_operands(weights.gate_up),
        *_operands(weights.down),
        *routing,
        layer=np.int32(layer),
        num_experts=np.int32(num_experts),
        most_few_tokens=np.int32(most_few_tokens),
    )
    return out


in_tiles = partial(experts, most_few_tokens=0)  # also steps of few tokens, for tests and benchmarks


def _operands(matrix: Matrix) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns numbers, scales and zero points. What a matrix lacks is the one before, again."""
    if not isinstance(matrix, QuantizedMatrix):
        return matrix, matrix, matrix
    return matrix.data, matrix.scale, matrix.scale if matrix.zero is None else matrix.zero


def _format_of(matrix: Matrix) -> Format | None:
    return matrix.format if isinstance(matrix, QuantizedMatrix) else None


def unsupported_reason(weights: ExpertWeights) -> str | None:
    """Returns why the kernels do not support these shapes or dtypes, or None if they do. No array is read."""
    _, num_local, embed, mlp = weights.down.shape
    form = _format_of(weights.down)
    if form != _format_of(weights.gate_up) or not (form in FORMATS or weights.down.dtype == jnp.bfloat16):
        return f"the experts are {weights.gate_up.dtype} and {weights.down.dtype}; bfloat16, fp8 or int4 are needed"
    multiple = _MLP_MULTIPLE[form]
    checks = (
        (num_local <= _MAX_EXPERTS, f"a device has {num_local} experts; {_MAX_EXPERTS} are supported"),
        (embed % _EMBED_MULTIPLE == 0, f"the embedding size is {embed}; a multiple of {_EMBED_MULTIPLE} is needed"),
        (
            mlp % multiple == 0,
            f"the intermediate size per device is {mlp}; a multiple of {multiple} is needed",
        ),
    )
    reason = next((reason for holds, reason in checks if not holds), None)
    return reason or next(filter(None, map(_unsupported_scales, weights.quantized or ())), None)


def _unsupported_scales(matrix: QuantizedMatrix) -> str | None:
    """Returns why the kernels do not support the scales of a matrix, or None if they do."""
    if matrix.scale.dtype.name not in _SCALE_DTYPES:
        return f"scales are {matrix.scale.dtype}; {', '.join(_SCALE_DTYPES)} are supported"
    columns, group, least = matrix.shape[-1], matrix.block[1], _LEAST_GROUP[matrix.format]
    if group != columns and (group < least or group & (group - 1)):
        return f"a scale covers {group} columns; whole rows or a power of two from {least} on are needed"
    return None


def unsupported_shapes(shapes: ExpertShapes) -> str | None:
    """Returns why the kernels cannot serve experts and the dtype of their tokens, or None if they can."""
    if reason := unsupported_reason(shapes.weights):
        return reason
    return None if shapes.dtype == jnp.bfloat16 else f"activations are {shapes.dtype}; bfloat16 is needed"


IMPLEMENTATION = ExpertsImplementation(
    name=NAME,
    automatic_on=("gpu",),
    unsupported_device=support.no_ampere,
    unsupported_shapes=unsupported_shapes,
    unavailable_reason=partial(build.unbuildable_reason, build.PORTABLE),
    experts=experts,
    cost=least_cost,
)
