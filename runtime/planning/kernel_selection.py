"""Selects the kernels of a server from its options, its devices and its model's shapes.

`name_kernels` decides by name, for any devices. `select_kernels` does so for devices of this process, which it tests,
and returns the kernels. `make_kernels` returns the kernels of given names, also for devices that are not present.
"""

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.kernels import decode_layers, experts, linear, paged_attention, sampling
from meshserve.kernels.cuda import build
from meshserve.kernels.p2p import P2PGroup, check
from meshserve.kernels.p2p import gpu as p2p_gpu
from meshserve.kernels.readback import gpu as readback_gpu
from meshserve.sharding.chips import chip_of
from meshserve.sharding.collectives import p2p_max_bytes
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import TENSOR_AXIS

from ..api.errors import ConfigError
from ..api.model_config import ModelConfig
from ..model.qwen3 import Kernels
from ..options.serve_config import ServeConfig
from ..program.step import CacheShape, state_shapes
from ..weights.registry import abstract_model, architecture_of

_log = logging.getLogger(__name__)

# With earlier releases, XLA copies each layer's weights out of the stacked array for cuBLAS (docs/log).
_LIBRARY_READS_IN_PLACE = jax.__version_info__ >= (0, 11)

# Decode steps of up to so many tokens run on the fused layers. Larger ones take cuBLAS less time, unless a layer's
# weights stay in the L2 cache of the GPU between the groups of 64 tokens of the fused layers (docs/log/decode.md).
_MAX_FUSED_TOKENS, _MAX_CACHED_FUSED_TOKENS = 64, 256
_MAX_INT4_FUSED_TOKENS = 128  # where larger steps dequantise 4-bit weights to bfloat16 in memory, every time
# Steps with prompts of up to so many tokens do, too, if weights are dense and on one device, and the cache has their
# dtype (docs/log/edge.md).
_MAX_FUSED_PROMPT_TOKENS = 128
_MAX_FUSED_EXPERT_TOKENS = 128  # of layers with experts, which are most of the time: XLA's router takes many kernels
_MAX_CHOSEN = 32  # experts of a token in the fused layers' router

_CUDA_NAMES = ("cuda", "cuda_fp8")  # implementations that are CUDA kernels
_LINEAR_NOTES = {
    "reference": "which dequantises in float32",
    "xla": "which dequantises: memory is saved, time is not",
    "xla_fp8": "which rounds activations to FP8 and dequantises: memory is saved, time is not",
    "cuda_fp8": "which rounds activations to FP8 and multiplies on the FP8 tensor cores",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelNames:
    """The kernels that a server uses, named like the values of the options. None is "auto"."""

    attention: str
    decode_layers: str
    linear: str
    all_reduce: str
    gemm_backend: str
    moe_backend: str

    @property
    def has_decode_kernels(self) -> bool:
        """Whether small decode steps run on fused layers."""
        return self.decode_layers != "off"

    @property
    def has_p2p(self) -> bool:
        return self.all_reduce == "p2p"


@dataclasses.dataclass(frozen=True, kw_only=True)
class P2PFindings:
    """What was learned about P2P at startup. A running server keeps it, because testing needs idle devices."""

    wrong_sums: str | None = None  # how P2P sums were wrong; None if they were right or have not been tested


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """The kernels of a server on devices of this process."""

    names: KernelNames
    kernels: Kernels
    findings: P2PFindings


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShapes:
    """The shapes that decide which kernels can serve a model."""

    model: ModelConfig
    layout: ShardLayout
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    page_size: int
    has_drafts: bool = False  # a request may have several tokens in a step


class CudaRefusals(NamedTuple):
    """Why the CUDA kernels cannot serve, by the option that names them; None if they can."""

    attention: str | None = None
    decode_layers: str | None = None
    moe_backend: str | None = None
    linear: str | None = None  # products with quantised weights


def max_fused_tokens(names: KernelNames, shapes: KernelShapes) -> int:
    """Returns the largest decode step, in tokens, that runs on the fused layers; 0 if none does."""
    if not names.has_decode_kernels:
        return 0
    model, num_devices = shapes.model, shapes.layout.num_shards
    layer_bytes = _layer_weights(model) * _weight_bytes(shapes)
    if model.experts is not None:
        return _MAX_FUSED_EXPERT_TOKENS
    is_cached = (
        num_devices == 1 and layer_bytes <= decode_layers.gpu.CACHED_LAYER_BYTES
    )  # not measured on several devices
    if is_cached:
        return _MAX_CACHED_FUSED_TOKENS
    if names.linear == "cuda_fp8" and names.decode_layers == "cuda" and num_devices == 1 and not shapes.has_drafts:
        if decode_layers.gpu.has_wide_steps(_layer_shapes(shapes), model.head_dim):
            return decode_layers.gpu.WIDE_TOKENS[-1]
    has_int4 = model.layer_quantisation is not None and model.layer_quantisation.is_int4
    return _MAX_INT4_FUSED_TOKENS if has_int4 and num_devices == 1 else _MAX_FUSED_TOKENS


def max_fused_prompt_tokens(names: KernelNames, shapes: KernelShapes) -> int:
    """Returns the largest step with prompts, in tokens, that runs on the fused layers; 0 if none does."""
    model = shapes.model
    is_simple = model.experts is None and not has_quantised_weights(model) and shapes.layout.num_shards == 1
    if not is_simple or names.attention != names.decode_layers or shapes.cache_dtype != shapes.dtype:
        return 0
    return min(_MAX_FUSED_PROMPT_TOKENS, max_fused_tokens(names, shapes))


def served_model(config: ServeConfig, model: ModelConfig, platform: str) -> ModelConfig:
    """Returns a quantised model as the devices hold it: with `--dequantize`, its layers in the activations' dtype.

    Decode steps of layers of up to 32 MiB in bfloat16 are as fast as with fewer bytes, or faster: their kernels wait
    for each other, not for weights. Prefill of 1,024 and more tokens is slower, 16 % at 4,096 (docs/log/decode.md).

    Raises:
      ConfigError: Weights of experts are to be dequantised.
    """
    quantisation = model.layer_quantisation
    if quantisation is None or config.dequantize == "never":
        return model
    if config.dequantize == "always" and model.experts is not None:
        raise ConfigError("--dequantize always: the weights of experts stay quantised. Use auto or never.")
    is_small = 2 * _layer_weights(model) <= decode_layers.gpu.CACHED_LAYER_BYTES and model.experts is None
    is_faster = is_small and model.pooling is None and platform == "gpu"
    if not is_faster and config.dequantize == "auto":
        return model
    return dataclasses.replace(model, quantisation=quantisation.held_plain())


def _layer_weights(model: ModelConfig) -> int:
    """Returns the number of weights in the projections of a dense layer."""
    heads = (2 * model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
    return (heads + 3 * model.mlp_dim) * model.embed_dim


def _weight_bytes(shapes: KernelShapes) -> float:
    """Returns the bytes of a weight of the layers, without its share of a scale."""
    quantisation = shapes.model.layer_quantisation
    if quantisation is None:
        return shapes.dtype.itemsize
    return 0.5 if quantisation.is_int4 else 1.0


def name_kernels(
    config: ServeConfig,
    *,
    platform: str,
    num_devices: int,
    cuda_refusals: CudaRefusals,
    has_quantised_weights: bool = False,
) -> KernelNames:
    """Returns the kernels that the options name, and for "auto" the fastest ones that can run.

    An automatic all-reduce is P2P on numbers of GPUs in one process for which it has been measured.

    Args:
      config: The options.
      platform: JAX's name for the devices' platform.
      num_devices: TP size.
      cuda_refusals: Why the CUDA kernels cannot serve on these devices.
      has_quantised_weights: Whether the model's layers have quantised weights.
    """
    ours, layers = {"tpu": ("tpu", "off"), "gpu": ("cuda", "cuda")}.get(platform, ("reference", "off"))
    if platform == "gpu":
        ours = ours if cuda_refusals.attention is None else "reference"
        layers = layers if cuda_refusals.decode_layers is None else "off"
    layers = layers if config.decode_layers == "auto" else config.decode_layers
    is_hopper = platform == "gpu" and "cuda" in (ours, layers)
    has_p2p = is_hopper and p2p_max_bytes(num_devices) > 0 and not config.coordinator
    has_fp8_products = platform == "gpu" and has_quantised_weights and cuda_refusals.linear is None
    backend = "library" if _LIBRARY_READS_IN_PLACE else "tuned"
    moe_backend = experts.default_name(platform) if cuda_refusals.moe_backend is None else "xla"
    return KernelNames(
        attention=ours if config.attention == "auto" else config.attention,
        decode_layers=layers,
        linear=("cuda_fp8" if has_fp8_products else "xla") if config.linear == "auto" else config.linear,
        all_reduce=("p2p" if has_p2p else "xla") if config.all_reduce == "auto" else config.all_reduce,
        gemm_backend=backend if config.gemm_backend == "auto" else config.gemm_backend,
        moe_backend=moe_backend if config.moe_backend == "auto" else config.moe_backend,
    )


def select_kernels(
    config: ServeConfig, shapes: KernelShapes, mesh: Mesh, findings: P2PFindings | None = None
) -> KernelSelection:
    """Selects the kernels for devices of this process. Builds the CUDA kernels and opens P2P memory if they are used.

    Args:
      findings: What an earlier selection learned. None at startup, when the devices are idle: an automatic all-reduce
        is then tested before it is P2P. While a program is served, the test and its steps could wait for each other.

    Raises:
      ValueError: A kernel that the options name cannot serve the model on these devices.
      ConfigError: The devices stopped during the P2P test, so no program can run on them any more.
    """
    device = mesh.devices.flat[0]
    asked = {config.attention, config.decode_layers, config.moe_backend, config.linear}
    may_use_cuda = not asked.isdisjoint(_CUDA_NAMES) or ("auto" in asked and device.platform == "gpu")
    refusals = _cuda_refusals(shapes, device) if may_use_cuda else CudaRefusals()
    names = name_kernels(
        config,
        platform=device.platform,
        num_devices=mesh.size,
        cuda_refusals=refusals,
        has_quantised_weights=has_quantised_weights(shapes.model),
    )
    p2p, known = None, findings or P2PFindings()
    if names.has_p2p and mesh.size > 1:
        if config.all_reduce == "p2p":
            p2p = _named_p2p_group(mesh)
        elif known.wrong_sums is None:
            p2p = _p2p_group(mesh)
            if p2p is not None and findings is None:
                known = P2PFindings(wrong_sums=_wrong_sums(mesh, p2p))
        if p2p is None or known.wrong_sums is not None:
            names, p2p = dataclasses.replace(names, all_reduce="xla"), None
    return KernelSelection(names, _kernels(names, shapes, mesh, refusals, p2p), known)


def make_kernels(names: KernelNames, shapes: KernelShapes, mesh: Mesh) -> Kernels:
    """Returns the named kernels for compiling programs for devices that are not present.

    Raises:
      ValueError: A named kernel cannot serve the model on such devices, or its compiler is not installed.
    """
    has_cuda = not {names.attention, names.decode_layers, names.moe_backend, names.linear}.isdisjoint(_CUDA_NAMES)
    refusals = _cuda_refusals(shapes, mesh.devices.flat[0]) if has_cuda else CudaRefusals()
    p2p = P2PGroup(axis=TENSOR_AXIS, ordinals=tuple(range(mesh.size))) if names.has_p2p and mesh.size > 1 else None
    return _kernels(names, shapes, mesh, refusals, p2p)


def _kernels(
    names: KernelNames, shapes: KernelShapes, mesh: Mesh, cuda_refusals: CudaRefusals, p2p: P2PGroup | None
) -> Kernels:
    device, attention, decode = mesh.devices.flat[0], names.attention, names.decode_layers
    _log_quantisation(names, shapes)
    if attention == "tpu" and device.platform == "tpu":
        return _tpu_kernels(names, shapes, device)
    is_gpu, has_cuda = device.platform == "gpu", "cuda" in (attention, decode)
    if decode == "reference":
        cuda_refusals = cuda_refusals._replace(decode_layers=_layers_refusal(shapes, decode))
    for option, reason in cuda_refusals._asdict().items():
        name = getattr(names, option)
        if reason is not None and (name in _CUDA_NAMES or (option, name) == ("decode_layers", "reference")):
            raise ValueError(f"--{option.replace('_', '-')} {name} cannot serve this model here: {reason}.")
        if reason is not None:
            _log.warning("%s: %s, which is slower than the CUDA kernels: %s", option.replace("_", " "), name, reason)
    _log.info("attention: %s; decode layers: %s; all-reduce: %s", attention, decode, "xla" if p2p is None else "p2p")
    if shapes.model.experts is not None:
        _log.info("experts: %s", names.moe_backend)
    return Kernels(
        attend=paged_attention.implementation(attention, device),
        attend_part=paged_attention.PARTIAL[attention],
        linear=linear.implementation(names.linear),
        # It leaves heads that it does not support to XLA.
        head=linear.gpu.output_head if is_gpu and decode == "cuda" else linear.xla.linear,
        write=paged_attention.WRITERS.get(attention, paged_attention.write_kv),
        # It finds the norms of a layer in one stack, by the model's layer.
        prepare=paged_attention.QK_NORM_ROPE.get(attention) if len(shapes.model.stacks) == 1 else None,
        decode=None if decode == "off" else decode_layers.implementation(decode, device),
        max_fused_tokens=max_fused_tokens(names, shapes),
        max_fused_prompt_tokens=max_fused_prompt_tokens(names, shapes),
        experts=experts.implementation(names.moe_backend, device),
        is_unrolled=is_gpu,
        has_output_buffers=is_gpu,
        has_statistics_apart=is_gpu,
        has_library_gemms=names.gemm_backend == "library",
        find_threshold=sampling.implementation(device, shapes.model.vocab_size) if has_cuda else None,
        readback=readback_gpu.write_tokens if decode == "cuda" and mesh.size == 1 else None,
        p2p=p2p,
        p2p_operations=p2p_gpu if p2p is not None else None,
    )


def _tpu_kernels(names: KernelNames, shapes: KernelShapes, device: jax.Device) -> Kernels:
    page_rows = shapes.page_size // shapes.layout.cp
    paged_attention.tpu.check_shapes(head_dim=shapes.model.head_dim, page_size=page_rows, dtype=shapes.cache_dtype)
    chip = chip_of(device)
    return Kernels(
        attend=paged_attention.IMPLEMENTATIONS["tpu"],
        attend_part=paged_attention.PARTIAL["tpu"],
        linear=linear.implementation(names.linear),
        write=paged_attention.WRITERS["tpu"],
        experts=experts.implementation(names.moe_backend, device),
        is_unrolled=chip is not None and chip.is_unrolled,
    )


def _named_p2p_group(mesh: Mesh) -> P2PGroup:
    """Opens P2P memory because the options ask for it.

    Raises:
      ValueError: The devices cannot access each other's memory.
    """
    try:
        return p2p_gpu.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))
    except (p2p_gpu.P2PError, build.KernelBuildError) as error:
        raise ValueError(f"--all-reduce p2p cannot serve here: {error}. Use --all-reduce xla.") from None


def _p2p_group(mesh: Mesh) -> P2PGroup | None:
    """Opens P2P memory; returns None and logs the reason if the devices cannot access each other's memory."""
    try:
        return p2p_gpu.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))
    except (p2p_gpu.P2PError, build.KernelBuildError) as error:
        _log.warning("the GPUs have no P2P access; using XLA's all-reduce, which is slower: %s", error)
        return None


def _wrong_sums(mesh: Mesh, p2p: P2PGroup) -> str | None:
    """Tests P2P sums; returns and logs how they are wrong, or None if they are right. Raises as `select_kernels`."""
    try:
        num_wrong = check.num_wrong_elements(mesh, p2p, p2p_gpu, p2p_max_bytes(mesh.size))
    except jax.errors.JaxRuntimeError as error:
        reason = p2p_gpu.timeouts() or str(error)
        raise ConfigError(f"the P2P all-reduce of the GPUs failed: {reason}. Start with --all-reduce xla.") from error
    if num_wrong == 0:
        return None
    reason = f"{num_wrong} elements of sums were wrong"
    _log.warning("the P2P all-reduce of the GPUs failed; using XLA's, which is slower: %s", reason)
    return reason


def _cuda_refusals(shapes: KernelShapes, device: jax.Device) -> CudaRefusals:
    """Returns why the CUDA kernels cannot serve the model on a device. Builds them."""
    reason = build.unavailable_reason(device)
    if reason is None:
        try:
            build.build()
        except build.KernelBuildError as error:
            reason = str(error)
    if reason is not None:
        refusals = all_refused(reason)
        return refusals if has_quantised_weights(shapes.model) else refusals._replace(linear=None)
    refusals = shape_refusals(shapes)
    if refusals.linear is None and has_quantised_weights(shapes.model):
        return refusals._replace(linear=linear.gpu.unavailable_reason(device))
    return refusals


def all_refused(reason: str) -> CudaRefusals:
    """Returns that no CUDA kernel can serve, for one reason."""
    return CudaRefusals(*(reason for _ in CudaRefusals._fields))


def shape_refusals(shapes: KernelShapes) -> CudaRefusals:
    """Returns why the CUDA kernels do not support a device's shard of the model."""
    attention = paged_attention.gpu.unsupported_reason(shapes.layout.group_size, shapes.dtype, _cache_shard(shapes))
    moe_backend = None
    if shapes.model.experts is not None:
        weights = _layer_shapes(shapes)
        moe_backend = experts.gpu.unsupported_reason(experts.ExpertWeights(weights.gate_up, weights.down))
        if moe_backend is None and shapes.dtype != jnp.bfloat16:
            moe_backend = f"activations are {shapes.dtype}; bfloat16 is needed"
    products = list(product_refusals(shapes).values())
    no_products = products[0] if products and all(products) else None
    return CudaRefusals(attention, _layers_refusal(shapes, "cuda"), moe_backend, no_products)


def product_refusals(shapes: KernelShapes) -> dict[str, str | None]:
    """Returns why our FP8 products do not support a device's shard of each quantised projection; None if they do.

    Experts have kernels of their own.
    """
    weights = _layer_shapes(shapes)
    if weights.router is not None:
        weights = weights._replace(gate_up=None, down=None)
    matrices = {name: value for name, value in weights._asdict().items() if isinstance(value, linear.QuantisedMatrix)}
    return {name: linear.gpu.unsupported_reason(matrix, shapes.dtype) for name, matrix in matrices.items()}


def has_quantised_weights(model: ModelConfig) -> bool:
    """Returns whether projections of the model's layers are quantised on the devices."""
    return model.layer_quantisation is not None


def _layers_refusal(shapes: KernelShapes, name: str) -> str | None:
    """Returns why fused layers do not support a device's shard of the model, or None if they do."""
    if shapes.layout.cp > 1:
        return "pages are divided among devices (cp), which merge their attention in every layer"
    if shapes.model.experts is not None:
        if shapes.layout.num_shards > 1:
            return "layers with experts are fused on one device only"
        if shapes.model.experts.num_chosen > _MAX_CHOSEN:
            return f"a token chooses {shapes.model.experts.num_chosen} experts; at most {_MAX_CHOSEN} are supported"
        if len(shapes.model.stacks) > 1:
            return "some layers of the model have experts and some do not"
    quantisation = shapes.model.quantisation
    if shapes.cache_dtype.itemsize == 1 and quantisation is not None and quantisation.has_kv_scales:
        return "the checkpoint has scales for the KV cache, which the fused layers do not apply"
    return decode_layers.unsupported_reason(_layer_shapes(shapes), _cache_shard(shapes), name)


def _layer_shapes(shapes: KernelShapes) -> decode_layers.LayerWeights:
    """Returns the shapes of a device's shard of the layers."""
    model, num_devices = shapes.model, shapes.layout.num_shards

    def shard(weight: nnx.Variable) -> nnx.Variable:
        shape = [
            size // (1 if axis is None else num_devices) for size, axis in zip(weight.shape, weight.axes, strict=True)
        ]
        return weight.replace(jax.ShapeDtypeStruct(tuple(shape), weight.get_value().dtype))

    _, abstract = abstract_model(model, shapes.layout, shapes.dtype)
    is_weight = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return architecture_of(model).layer_weights(jax.tree.map(shard, abstract["layers"], is_leaf=is_weight))


def _cache_shard(shapes: KernelShapes) -> Any:
    """Returns the shape of one page of the cache on a device."""
    one_page = CacheShape(1, shapes.page_size, 1, 1)
    whole = state_shapes(shapes.model, shapes.layout, one_page, shapes.cache_dtype).cache.shape
    return jax.ShapeDtypeStruct((*whole[:2], whole[2] // shapes.layout.num_shards, *whole[3:]), shapes.cache_dtype)


def _log_quantisation(names: KernelNames, shapes: KernelShapes) -> None:
    """Logs what is quantised, and what serves it."""
    quantisation, description = shapes.model.quantisation, shapes.model.quantisation_name
    if description:
        fused = max_fused_tokens(names, shapes) if names.decode_layers == "cuda" else 0
        if fused:
            _log.info("quantised weights: decode steps of up to %d tokens multiply them in the fused layers", fused)
        rest = "other steps" if fused else "all steps"
        _log.info(
            "quantised weights: %s; linear in %s: %s, %s", description, rest, names.linear, _LINEAR_NOTES[names.linear]
        )
    if names.linear == "cuda_fp8":
        for name, reason in product_refusals(shapes).items():
            if reason is not None:
                _log.warning("%s: XLA multiplies with dequantised weights, which is slower: %s", name, reason)
    if quantisation is not None and quantisation.dequantised:
        _log.info(
            "layers: %s weights, dequantised to %s while they are loaded (--dequantize)",
            quantisation.name,
            shapes.dtype,
        )
    elif quantisation is not None and not quantisation.parameters:
        _log.warning("every projection is dequantised while it is loaded: each is left out in some layer")
    if shapes.cache_dtype.itemsize == 1:
        has_scales = quantisation is not None and quantisation.has_kv_scales
        kind = "with the checkpoint's scales" if has_scales else "without scales"
        _log.info("KV cache: %s, %s", shapes.cache_dtype, kind)
