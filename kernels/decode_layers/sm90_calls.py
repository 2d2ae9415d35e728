"""Runs the layers of a decode step on an NVIDIA Hopper GPU, in bfloat16: see ../cuda.

Matrices may be quantized, all to FP8 or all to 4 bits. They stay so until they are multiplied. In steps of 17 to 64
tokens without drafts, on one device, FP8 weights are multiplied by activations rounded to FP8, and in steps of
`WIDE_TOKENS` cuBLASLt does that; see ../cuda/layers/wide_step.cuh.

One XLA call launches five kernels per layer, four for up to 8 tokens of a small model, or seven on a mesh. Each kernel
lets the next one start early and fetch its weights while it waits (programmatic dependent launch), so that memory stays
busy between kernels.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels import p2p
from meshserve.kernels.cuda import build, cublas_lt, operands
from meshserve.kernels.experts import ExpertWeights
from meshserve.kernels.experts import sm90 as experts_sm90
from meshserve.kernels.linear import E4M3, FP8, INT4, Format, Matrix, QuantizedMatrix
from meshserve.kernels.linear import sm90 as linear_sm90
from meshserve.kernels.p2p import sm90 as p2p_sm90
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.kernels.paged_attention.sm90 import TILE_ROWS
from meshserve.kernels.paged_attention.tiles import split_work
from meshserve.kernels.router import RouterOptions

from .contract import DecodeBatch, LayerSettings, LayerWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How the kernels split their work, for benchmarks; 0 selects the default."""

    qkv_splits: int = 0  # ranges that the summed dimension is split into, 1 to 8
    o_splits: int = 0
    gate_up_splits: int = 0
    down_splits: int = 0
    attention_splits: int = 0  # ranges that the context is split into, a power of two up to 8
    blocks_per_stage: int = 0  # blocks of 64 columns each
    ring_kilobytes: int = 0  # shared memory for weights in flight
    streams: int = 0  # 2 runs the halves of a batch side by side, on two streams; 1 does not

    def attribute(self) -> np.ndarray:
        return np.array(dataclasses.astuple(self), np.int32)


CHOSEN = LaunchShape()
# Formats of quantized matrices: the fewest columns that may share a scale, and dtypes of scales.
_FORMATS: dict[Format, tuple[int, tuple[str, ...]]] = {
    E4M3: (64, ("bfloat16", "float16", "float32")),
    INT4: (32, ("bfloat16", "float16")),
}
# A layer of at most this size stays in the GPU's L2 cache between groups of tokens (docs/log/first_days.md).
CACHED_LAYER_BYTES = 32 << 20
_HALVED_TOKENS = 64  # from here on, the halves of a batch run side by side if the layers stay in the cache
_MAX_ROUTED_EXPERTS = 128  # which the router's clusters score
_MAX_CHOSEN = 32  # experts of a token
# Steps of these token counts take less time with cuBLASLt than with the fused GEMMs, which read weights per 64 tokens.
WIDE_TOKENS = range(65, 257)
_WIDE_MULTIPLE = 16  # tokens are a multiple of it, for the alignment of cuBLASLt's operands


def unsupported_reason(weights: LayerWeights, cache: jax.Array) -> str | None:
    """Returns why the kernels do not support these shapes or dtypes, or None if they do."""
    embed, mlp, q_columns = weights.o.shape[1], weights.down.shape[-1], weights.o.shape[2]
    _, _, kv_heads, _, page_size, head_dim = cache.shape
    group = weights.group_size(head_dim)
    checks = (
        (head_dim in (64, 128), f"head_dim is {head_dim}; 64 and 128 are supported"),
        (1 <= group <= 8, f"there are {group} query heads per kv head; 1 to 8 are supported"),
        (page_size % 16 == 0, f"page_size is {page_size}; a multiple of 16 is needed"),
        (embed % 128 == 0, f"the embedding size is {embed}; a multiple of 128 is needed"),
        (weights.router is not None or mlp % 64 == 0, f"the MLP size per device is {mlp}; a multiple of 64 is needed"),
        (q_columns % 64 == 0, f"the query size per device is {q_columns}; a multiple of 64 is needed"),
        (q_columns == kv_heads * group * head_dim, "the output projection does not match the query heads"),
    )
    for holds, reason in checks:
        if not holds:
            return reason
    matrices = {name: array for name, array in weights._asdict().items() if isinstance(array, QuantizedMatrix)}
    for name, array in weights._asdict().items():
        if array is not None and array.dtype != jnp.bfloat16 and name not in matrices:
            return f"{name} is {array.dtype}; bfloat16 is needed"
    if cache.dtype not in (jnp.bfloat16, FP8):
        return f"the cache is {cache.dtype}; bfloat16 or {FP8} is needed"
    if matrices and (unsupported := _unsupported_quantization(matrices)):
        return unsupported
    if weights.router is None:
        return None
    if weights.router.shape[1] > _MAX_ROUTED_EXPERTS:
        return f"there are {weights.router.shape[1]} experts; the router of fused layers has {_MAX_ROUTED_EXPERTS}"
    if weights.down.shape[1] != weights.router.shape[1]:
        return "layers with experts are fused on one device only"
    return experts_sm90.unsupported_reason(ExpertWeights(weights.gate_up, weights.down))


def unsupported_router_reason(options: RouterOptions) -> str | None:
    """Returns why the kernels do not choose experts in this way, or None if they do. An option is passed in a call."""
    if options.num_chosen > _MAX_CHOSEN:
        return f"a token chooses {options.num_chosen} experts; at most {_MAX_CHOSEN} are supported"
    return None


def _unsupported_quantization(matrices: dict[str, QuantizedMatrix]) -> str | None:
    """Returns why quantized matrices, by name, are not supported, or None if they are."""
    if missing := [name for name in ("qkv", "o", "gate_up", "down") if name not in matrices]:
        return f"{missing[0]} is not quantized, but {min(matrices)} is; all four matrices or none must be"
    if len(formats := {matrix.format.name for matrix in matrices.values()}) > 1:
        return f"matrices are {' and '.join(sorted(formats))}; all must have the same format"
    for name, matrix in matrices.items():
        if matrix.format not in _FORMATS:
            return f"{name} is {matrix.format.name}; {' and '.join(form.name for form in _FORMATS)} are supported"
        (least, allowed), columns, group = _FORMATS[matrix.format], matrix.shape[-1], matrix.block[1]
        if group != columns and (group < least or group & (group - 1)):
            return f"a scale of {name} covers {group} columns; whole rows or a power of two from {least} on are needed"
        if matrix.scale.dtype.name not in allowed:
            return f"scales of {name} are {matrix.scale.dtype}; {', '.join(allowed)} work"
    return None


def _call(name: str, matrix: Matrix, *arguments: Any, **attributes: Any) -> Any:
    """Returns the XLA call that takes matrices like this one."""
    suffix = "_quantized" if isinstance(matrix, QuantizedMatrix) else ""
    return jax.ffi.ffi_call(f"meshserve_{name}{suffix}", *arguments, **attributes)


def _stack_attributes(settings: LayerSettings, layers: range, launch: LaunchShape) -> dict[str, Any]:
    """Returns the attributes that every call of several layers takes."""
    return {
        "first_layer": np.int32(layers.start),
        "num_layers": np.int32(len(layers)),
        "epsilon": np.float32(settings.epsilon),
        "scale": np.float32(settings.softmax_scale),
        "tuning": launch.attribute(),
    }


def _parts(*weights: Matrix) -> tuple[jax.Array, ...]:
    """Returns the operands for weights. A quantized matrix is three: without zero points, its scales come twice."""
    parts: list[jax.Array] = []
    for matrix in weights:
        if isinstance(matrix, QuantizedMatrix):
            parts += (matrix.data, matrix.scale, matrix.scale if matrix.zero is None else matrix.zero)
        else:
            parts.append(matrix)
    return tuple(parts)


def _scratch(batch: int, *, embed: int = 0, heads: Sequence[int] = (0, 0, 0), mlp: int = 0) -> jax.ShapeDtypeStruct:
    """Returns the shape of the scratch memory. `heads` is (KV heads, query heads per KV head, head_dim)."""
    num_bytes = build.load().meshserve_scratch_bytes(batch, embed, *heads, mlp)
    return jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)


def _heads(weights: LayerWeights, cache: jax.Array) -> tuple[int, int, int]:
    _, _, kv_heads, _, _, head_dim = cache.shape
    return kv_heads, weights.group_size(head_dim), head_dim


def _like(x: jax.Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or x.shape, x.dtype)


def decode_layers(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: DecodeBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layers: range | None = None,
    launch: LaunchShape = CHOSEN,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `DecodeKernels`."""
    layers = range(weights.qkv.shape[0]) if layers is None else layers
    if layers.step != 1 or len(layers) == 0:
        raise ValueError(f"layers is {layers}; a non-empty range of consecutive layers is needed")
    if settings.p2p is not None and x.nbytes > p2p.MAX_BYTES:
        raise ValueError(f"x has {x.nbytes} bytes; the P2P all-reduce within the layers takes at most {p2p.MAX_BYTES}")
    if weights.router is not None:
        arguments = (x, weights, cache, batch, inverse_frequencies)
        return _expert_layers(*arguments, settings=settings, layers=layers, launch=launch)
    batch_size, embed = x.shape
    if batch_size in WIDE_TOKENS and not settings.has_drafts and settings.p2p is None:
        if has_wide_steps(weights, cache.shape[5]):
            arguments = (x, weights, cache, batch, inverse_frequencies)
            return *_wide_layers(*arguments, settings=settings, layers=layers, launch=launch), None
    if launch.streams == 0 and _is_halved(batch_size, weights, settings):
        launch = dataclasses.replace(launch, streams=2)
    scratch = _scratch(batch_size, embed=embed, heads=_heads(weights, cache), mlp=weights.down.shape[2])
    parts = _parts(*weights[:-1])
    x, cache, _ = _call(
        "decode_layers", weights.qkv, (_like(x), _like(cache), scratch), input_output_aliases={1 + len(parts): 1}
    )(
        x,
        *parts,
        cache,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        inverse_frequencies,
        rotary_scale=np.float32(settings.rotary_scale),
        may_round=np.int32(not settings.has_drafts and settings.p2p is None),
        ordinals=p2p_sm90.attribute(settings.p2p),
        **_stack_attributes(settings, layers, launch),
    )
    return x, cache, None


def has_wide_steps(weights: LayerWeights, head_dim: int) -> bool:
    """Returns whether steps of `WIDE_TOKENS` without drafts multiply these weights, or their shapes, by cuBLASLt.

    They are then on one device. Scales cover 128 columns, and a head has as many. Smaller layers, which stay in the L2
    cache between groups of tokens, take the fused products.
    """
    matrices = (weights.qkv, weights.o, weights.gate_up, weights.down)
    if weights.router is not None or head_dim != linear_sm90.BLOCK_COLUMNS or _is_cached(weights):
        return False
    return all(
        isinstance(matrix, QuantizedMatrix)
        and linear_sm90.unsupported_reason(matrix, jnp.dtype("bfloat16")) is None
        and matrix.block[1] == linear_sm90.BLOCK_COLUMNS
        and matrix.scale.dtype in (jnp.bfloat16, jnp.float32)
        for matrix in matrices
    )


def _wide_layers(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: DecodeBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layers: range,
    launch: LaunchShape,
) -> tuple[jax.Array, jax.Array]:
    """Runs layers of a step of `WIDE_TOKENS`; see `DecodeKernels.decode_layers` and `has_wide_steps`."""
    cublas_lt.open_library()
    num_tokens, num_more = x.shape[0], -x.shape[0] % _WIDE_MULTIPLE
    x = jnp.pad(x, ((0, num_more), (0, 0)))
    positions = jnp.pad(batch.positions, (0, num_more), constant_values=-1)
    page_table = jnp.pad(batch.page_table, ((0, num_more), (0, 0)))
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies
    batch_size, embed = x.shape
    algorithms = [
        linear_sm90.algorithm_for(matrix, batch_size, num_stacked=matrix.shape[0])
        for matrix in (weights.qkv, weights.o, weights.gate_up, weights.down)
    ]
    num_bytes = build.load().meshserve_wide_scratch_bytes(
        batch_size, embed, *_heads(weights, cache), weights.down.shape[2]
    )
    results = (_like(x), _like(cache), jax.ShapeDtypeStruct((num_bytes,), jnp.uint8))
    parts = [part for matrix in weights[:-1] for part in _parts(matrix)[:2]]  # without zero points
    aliases = {1 + len(parts): 1}
    x, cache, _ = jax.ffi.ffi_call("meshserve_decode_layers_wide", results, input_output_aliases=aliases)(
        x,
        *parts,
        cache,
        page_table,
        operands.beside_tokens(positions),
        jnp.cos(angles) * settings.rotary_scale,
        jnp.sin(angles) * settings.rotary_scale,
        is_spread=np.array([algorithm.is_spread for algorithm in algorithms], np.int32),
        candidates=np.array([algorithm.candidate for algorithm in algorithms], np.int32),
        **_stack_attributes(settings, layers, launch),
    )
    return x[:num_tokens], cache


def _is_halved(batch_size: int, weights: LayerWeights, settings: LayerSettings) -> bool:
    """Returns whether the halves of a batch run side by side. No token may then depend on another of its step."""
    if settings.has_drafts or settings.p2p is not None or isinstance(weights.qkv, QuantizedMatrix):
        return False
    return batch_size >= _HALVED_TOKENS and _is_cached(weights)


def _is_cached(weights: LayerWeights) -> bool:
    """Returns whether a layer stays in the L2 cache."""
    matrices = (weights.qkv, weights.o, weights.gate_up, weights.down)
    arrays = [matrix.data if isinstance(matrix, QuantizedMatrix) else matrix for matrix in matrices]
    num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return num_bytes <= CACHED_LAYER_BYTES * weights.qkv.shape[0]


def prompt_layers(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: PagedBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layers: range | None = None,
    launch: LaunchShape = CHOSEN,
) -> tuple[jax.Array, jax.Array]:
    """See `DecodeKernels`. Attention is that of larger steps with prompts (prefill_attention.cuh).

    Raises:
      ValueError: the weights are quantized, the layers have experts, or several devices share them.
    """
    layers = range(weights.qkv.shape[0]) if layers is None else layers
    if isinstance(weights.qkv, QuantizedMatrix) or weights.router is not None or settings.p2p is not None:
        raise ValueError("prompt_layers takes dense layers in bfloat16 on one device; use the steps without it.")
    (num_tokens, embed), heads = x.shape, _heads(weights, cache)
    parts, scratch = split_work(batch, heads=heads, page_size=cache.shape[4], tile_rows=TILE_ROWS)
    results = (
        _like(x),
        _like(cache),
        _scratch(num_tokens, embed=embed, heads=heads, mlp=weights.down.shape[2]),
        *scratch,
    )
    x, cache, *_ = jax.ffi.ffi_call("meshserve_prompt_layers", results, input_output_aliases={9: 1})(
        x,
        *weights[:-1],
        cache,
        batch.page_table[batch.token_request],
        operands.beside_tokens(batch.positions),
        inverse_frequencies,
        parts,
        batch.page_table,
        rotary_scale=np.float32(settings.rotary_scale),
        **_stack_attributes(settings, layers, launch),
    )
    return x, cache


def _expert_layers(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: DecodeBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layers: range,
    launch: LaunchShape,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs layers with experts; see `DecodeKernels.decode_layers`."""
    (batch_size, embed), router = x.shape, settings.router
    assert router is not None
    stacks = ExpertWeights(weights.gate_up, weights.down)
    norms = weights.q_norm, weights.k_norm
    parts = _parts(weights.input_norm, weights.qkv, *norms, weights.o, weights.post_norm)
    name = "meshserve_decode_expert_layers" + ("" if stacks.quantized is None else "_fp8")
    expert_parts = experts_sm90.operands(stacks)
    num_before_cache = 1 + len(parts) + 1 + len(expert_parts)
    results = (
        _like(x),
        _like(cache),
        _scratch(batch_size, embed=embed, heads=_heads(weights, cache)),
        experts_sm90.scratch(batch_size, router.num_chosen, stacks),
        jax.ShapeDtypeStruct((len(layers), batch_size, router.num_chosen), jnp.int32),
    )
    x, cache, _, _, chosen = jax.ffi.ffi_call(name, results, input_output_aliases={num_before_cache: 1})(
        x,
        *parts,
        weights.router,
        *expert_parts,
        cache,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        inverse_frequencies,
        num_chosen=np.int32(router.num_chosen),
        most_few_tokens=np.int32(experts_sm90.FEW_TOKENS),
        is_normalized=np.int32(router.is_normalized),
        rotary_scale=np.float32(settings.rotary_scale),
        **_stack_attributes(settings, layers, launch),
    )
    return x, cache, chosen


def qkv(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: DecodeBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layer: int,
    launch: LaunchShape = CHOSEN,
) -> tuple[jax.Array, jax.Array]:
    """See `DecodeKernels`."""
    (batch_size, embed), heads = x.shape, _heads(weights, cache)
    parts = _parts(weights.input_norm, weights.qkv, weights.q_norm, weights.k_norm)
    q, cache, _ = _call(
        "decode_qkv",
        weights.qkv,
        (_like(x, batch_size, *heads), _like(cache), _scratch(batch_size, embed=embed, heads=heads)),
        input_output_aliases={1 + len(parts): 1},
    )(
        x,
        *parts,
        cache,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        inverse_frequencies,
        layer=np.int32(layer),
        epsilon=np.float32(settings.epsilon),
        rotary_scale=np.float32(settings.rotary_scale),
        tuning=launch.attribute(),
    )
    return q, cache


def attention(
    q: jax.Array,
    cache: jax.Array,
    batch: DecodeBatch,
    *,
    settings: LayerSettings,
    layer: int | jax.Array,
    launch: LaunchShape = CHOSEN,
) -> jax.Array:
    """See `DecodeKernels`.

    Raises:
      TypeError: `layer` is not a Python number.
    """
    if isinstance(layer, jax.Array):
        raise TypeError("layer is an array; the CUDA kernels need a Python number: unroll the layers")
    batch_size, *heads = q.shape
    results = (_like(q, batch_size, q[0].size), _scratch(batch_size, heads=heads))
    out, _ = jax.ffi.ffi_call("meshserve_paged_attention", results)(
        q,
        cache,
        batch.page_table,
        operands.beside_tokens(batch.positions),
        layer=np.int32(layer),
        scale=np.float32(settings.softmax_scale),
        tuning=launch.attribute(),
    )
    return out


def _project_residual(
    x: jax.Array, matrix: Matrix, residual: jax.Array | None, *, layer: int, is_down: bool, launch: LaunchShape
) -> jax.Array:
    build.load()
    result = _like(x, x.shape[0], matrix.shape[1])
    converted = jax.ShapeDtypeStruct((operands.activation_bytes(*x.shape),), jnp.uint8)  # scratch
    scratch = (converted,) if isinstance(matrix, QuantizedMatrix) else ()
    out, *_ = _call("project_residual", matrix, (result, *scratch))(
        x,
        *_parts(matrix),
        x if residual is None else residual,
        layer=np.int32(layer),
        has_residual=np.int32(residual is not None),
        is_down=np.int32(is_down),
        tuning=launch.attribute(),
    )
    return out


def output(
    attended: jax.Array,
    weights: LayerWeights,
    residual: jax.Array | None,
    *,
    layer: int,
    launch: LaunchShape = CHOSEN,
) -> jax.Array:
    """See `DecodeKernels`."""
    return _project_residual(attended, weights.o, residual, layer=layer, is_down=False, launch=launch)


def gate_up(
    x: jax.Array, weights: LayerWeights, *, settings: LayerSettings, layer: int, launch: LaunchShape = CHOSEN
) -> jax.Array:
    """See `DecodeKernels`."""
    (batch_size, embed), mlp = x.shape, weights.gate_up.shape[2]
    results = (_like(x, batch_size, mlp), _scratch(batch_size, embed=embed, mlp=mlp))
    activated, _ = _call("decode_gate_up", weights.gate_up, results)(
        x,
        weights.post_norm,
        *_parts(weights.gate_up),
        layer=np.int32(layer),
        epsilon=np.float32(settings.epsilon),
        tuning=launch.attribute(),
    )
    return activated


def down(
    activated: jax.Array,
    weights: LayerWeights,
    residual: jax.Array | None,
    *,
    layer: int,
    launch: LaunchShape = CHOSEN,
) -> jax.Array:
    """See `DecodeKernels`."""
    return _project_residual(activated, weights.down, residual, layer=layer, is_down=True, launch=launch)
