"""Fused layers on an NVIDIA Hopper GPU: what they support, the steps for which they are faster, and what they cost.

`sm90_calls` computes them.
"""

from meshserve.kernels.cuda import build, support
from meshserve.kernels.experts import ExpertShapes, ExpertStep, ExpertWeights
from meshserve.kernels.experts import sm90 as experts_sm90
from meshserve.kernels.implementation import Cost
from meshserve.kernels.linear import QuantizedMatrix
from meshserve.kernels.linear import sm90 as linear_sm90
from meshserve.kernels.linear.contract import least_cost
from meshserve.kernels.paged_attention import AttentionShapes, AttentionStep
from meshserve.kernels.paged_attention import sm90 as attention_sm90

from . import sm90_calls
from .contract import DecodeImplementation, DecodeShapes, unsupported_layers

# Decode steps of up to this number of tokens run on the fused layers. Larger ones take less time with cuBLAS, unless a
# layer's weights stay in the GPU's L2 cache between the groups of 64 tokens (docs/log/first_days.md).
MAX_TOKENS, MAX_CACHED_TOKENS = 64, 256
_MAX_PACKED_TOKENS = 128  # where larger steps dequantize the weights to bfloat16 in memory, every time
_MAX_EXPERT_TOKENS = 128  # for layers with experts, which take most of the time: XLA's router takes many kernels
# Steps with prompts of up to this number of tokens also do if weights are dense and on one device, and the cache has
# their dtype (docs/log/edge.md).
_MAX_PROMPT_TOKENS = 128


def unsupported_shapes(shapes: DecodeShapes) -> str | None:
    """Returns why the kernels do not support a model's layers, or None if they do."""
    if reason := unsupported_layers(shapes):
        return reason
    if shapes.router is not None and (reason := sm90_calls.unsupported_router_reason(shapes.router)):
        return reason
    return sm90_calls.unsupported_reason(shapes.weights, shapes.cache)


def max_tokens(shapes: DecodeShapes) -> int:
    """Returns the largest decode step, in tokens, that takes less time on the fused layers."""
    if shapes.weights.router is not None:
        return _MAX_EXPERT_TOKENS
    if shapes.num_devices > 1:
        return MAX_TOKENS  # the others are not measured on several devices
    if shapes.layer_bytes <= sm90_calls.CACHED_LAYER_BYTES:
        return MAX_CACHED_TOKENS
    if shapes.has_fp8_products and not shapes.has_drafts:
        if sm90_calls.has_wide_steps(shapes.weights, shapes.cache.shape[5]):
            return sm90_calls.WIDE_TOKENS[-1]
    qkv = shapes.weights.qkv
    is_dequantized = isinstance(qkv, QuantizedMatrix) and qkv.format not in linear_sm90.FORMATS
    return _MAX_PACKED_TOKENS if is_dequantized else MAX_TOKENS


def max_prompt_tokens(shapes: DecodeShapes) -> int:
    """Returns the largest step with prompts, in tokens, that takes less time on the fused layers; 0 if none does."""
    is_simple = shapes.weights.router is None and not shapes.is_quantized and shapes.num_devices == 1
    if not is_simple or shapes.cache.dtype != shapes.weights.qkv.dtype:
        return 0
    return min(_MAX_PROMPT_TOKENS, max_tokens(shapes))


def cost(shapes: DecodeShapes, step: AttentionStep, experts: ExpertStep | None) -> Cost:
    """Estimates the cost of one layer: weights are read once, as they are stored."""
    weights, num_layers = shapes.weights, shapes.weights.qkv.shape[0]
    dtype = weights.input_norm.dtype
    group = weights.group_size(shapes.cache.shape[5])
    matrices = [weights.qkv, weights.o] if weights.router is not None else [weights.qkv, weights.o, weights.gate_up]
    matrices += [weights.down] if weights.router is None else []
    total = Cost()
    for matrix in matrices:
        total += least_cost(matrix, step.num_tokens, dtype).times(1 / num_layers)
    total += attention_sm90.IMPLEMENTATION.cost(AttentionShapes.of(group, dtype, shapes.cache), step)
    if experts is not None:
        stacks = ExpertWeights(weights.gate_up, weights.down)
        total += experts_sm90.cost(ExpertShapes(weights=stacks, dtype=dtype), experts)
    return total


IMPLEMENTATION = DecodeImplementation(
    name="cuda",
    unsupported_device=support.no_hopper,
    unsupported_shapes=unsupported_shapes,
    unavailable_reason=build.unbuildable_reason,
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    kernels=sm90_calls,
    cost=cost,
    max_tokens=max_tokens,
    max_prompt_tokens=max_prompt_tokens,
    head=linear_sm90.output_head,
)
