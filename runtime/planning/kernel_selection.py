"""Which kernels serve: chosen once at start-up from the devices, the model's shapes and the config, and logged."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from meshserve.kernels import decode_layers, paged_attention, sampling
from meshserve.kernels.cuda import build
from meshserve.kernels.p2p import P2PGroup, check
from meshserve.kernels.p2p import gpu as p2p_gpu
from meshserve.sharding.chips import chip_of
from meshserve.sharding.collectives import p2p_max_bytes
from meshserve.sharding.mesh import TENSOR_AXIS

from ..api.config import ServeConfig, serving_dtype
from ..api.errors import ConfigError
from ..api.model_config import ModelConfig
from ..model.qwen3 import Kernels
from ..program.step import CacheShape, state_shapes
from ..weights.orbax_layout import model_layout
from ..weights.registry import abstract_model, architecture_of

_log = logging.getLogger(__name__)

# Where it does not, XLA cuts every layer's weights out of the stack for cuBLAS (docs/log).
_LIBRARY_READS_IN_PLACE = jax.__version_info__ >= (0, 11)

# What trying sums by peers has shown, by mesh. Where some were wrong no peers are taken any more, at no degree.
_tried_sums: dict[Mesh, str | None] = {}


def named_kernels(
    config: ServeConfig, model: ModelConfig, *, platform: str, num_devices: int, refusal: str | None = None
) -> ServeConfig:
    """The config with kernels in place of "auto": ours on a TPU and on a GPU that can run them, else XLA's.

    GPUs of one process add up as peers, if so many have been measured.

    Args:
      platform: jax's, of the devices.
      refusal: why the CUDA kernels cannot run on these devices; None: they can.

    Raises:
      ValueError: the model cannot be split over so many devices.
    """
    ours, layers = {"tpu": ("tpu", "off"), "gpu": ("cuda", "cuda")}.get(platform, ("reference", "off"))
    if platform == "gpu":
        refusal = refusal or _shape_refusal(config, model, num_devices)
        if refusal is not None:
            ours, layers = "reference", "off"
    layers = layers if config.decode_layers == "auto" else config.decode_layers
    has_p2p = platform == "gpu" and layers == "cuda" and p2p_max_bytes(num_devices) > 0 and not config.coordinator
    return dataclasses.replace(
        config,
        attention=ours if config.attention == "auto" else config.attention,
        decode_layers=layers,
        all_reduce=("p2p" if has_p2p else "xla") if config.all_reduce == "auto" else config.all_reduce,
    )


def kernels_here(config: ServeConfig, model: ModelConfig, mesh: Mesh, *, are_devices_idle: bool = False) -> ServeConfig:
    """As `named_kernels`, for the devices of a mesh. Builds the CUDA kernels if they are to serve, and sees whether the
    devices can be peers.

    Args:
      are_devices_idle: as at a start. Then peers must add up right before "auto" takes them; while another program is
        served, its steps and such sums might wait for each other.

    Raises:
      ConfigError: the devices stopped in the middle of a sum; no program can run on them any more.
      ValueError: as `named_kernels`.
    """
    if "auto" not in (config.attention, config.decode_layers, config.all_reduce):
        return config
    device = mesh.devices.flat[0]
    refusal = build.unavailable_reason(device) or _build_refusal()
    named = named_kernels(config, model, platform=device.platform, num_devices=mesh.size, refusal=refusal)
    if config.all_reduce == "auto" and named.all_reduce == "p2p":
        if are_devices_idle and mesh not in _tried_sums and _p2p_refusal(mesh) is None:
            _tried_sums[mesh] = _sums_refusal(mesh)
        refusals = (_p2p_refusal(mesh), *_tried_sums.values())
        if any(refusal is not None for refusal in refusals):
            named = dataclasses.replace(named, all_reduce="xla")
    return named


def choose_kernels(config: ServeConfig, model: ModelConfig, mesh: Mesh, *, are_devices_here: bool = True) -> Kernels:
    """The kernels that `attention` and `decode_layers` name; for "auto" see `named_kernels`. Devices that are not here
    can have programs compiled for them, but not be opened as peers.

    Raises:
      ValueError: a named implementation cannot run here.
    """
    device = mesh.devices.flat[0]
    if are_devices_here:
        config = kernels_here(config, model, mesh)
    else:
        config = named_kernels(config, model, platform=device.platform, num_devices=mesh.size)
    if config.attention == "tpu" and device.platform == "tpu":
        return tpu_kernels(config, model, mesh)
    attention, decode, is_gpu = config.attention, config.decode_layers, device.platform == "gpu"
    if is_gpu or "cuda" in (attention, decode):
        reason = build.unavailable_reason(device) or _build_refusal() or _shape_refusal(config, model, mesh.size)
        for option, chosen in (("attention", attention), ("decode_layers", decode)):
            if chosen == "cuda" and reason is not None:
                raise ValueError(f"--{option.replace('_', '-')} cuda cannot serve this model here: {reason}.")
        if reason is not None:
            _log.warning("XLA's kernels serve, which are slower: %s", reason)
    p2p = _p2p(mesh, are_devices_here) if config.all_reduce == "p2p" else None
    _log.info("attention: %s; decode layers: %s; sums: %s", attention, decode, "xla" if p2p is None else "p2p")
    return Kernels(
        attend=paged_attention.implementation(attention, device),
        write=paged_attention.WRITERS.get(attention, paged_attention.write_kv),
        prepare=paged_attention.QK_NORM_ROPE.get(attention),
        decode=None if decode == "off" else decode_layers.implementation(decode, device),
        is_unrolled=is_gpu,
        has_output_buffers=is_gpu,
        has_statistics_apart=is_gpu,
        has_library_gemms=config.gemm_backend == "library"
        or (config.gemm_backend == "auto" and _LIBRARY_READS_IN_PLACE),
        find_threshold=sampling.implementation(device, model.vocab_size) if "cuda" in (attention, decode) else None,
        p2p=p2p,
        p2p_operations=p2p_gpu if p2p is not None else None,
    )


def _p2p(mesh: Mesh, are_devices_here: bool) -> P2PGroup | None:
    """The mesh's devices as peers; one device alone needs none.

    Raises:
      ValueError: they cannot be.
    """
    if mesh.size == 1:
        return None
    if not are_devices_here:
        return P2PGroup(axis=TENSOR_AXIS, ordinals=tuple(range(mesh.size)))
    reason = _p2p_refusal(mesh)
    if reason is not None:
        raise ValueError(f"--all-reduce p2p cannot serve here: {reason}. Take xla.")
    return p2p_gpu.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))


@functools.cache
def _p2p_refusal(mesh: Mesh) -> str | None:
    """Why the mesh's devices cannot be peers, which is logged; None if they are."""
    try:
        p2p_gpu.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))
    except (p2p_gpu.P2PError, build.KernelBuildError) as error:
        _log.warning("the GPUs cannot be peers, and XLA's sums are slower: %s", error)
        return str(error)
    return None


def _sums_refusal(mesh: Mesh) -> str | None:
    """What is wrong with sums that the mesh's devices do as peers, which is logged; None if nothing is.

    Raises:
      ConfigError: see `kernels_here`.
    """
    p2p = p2p_gpu.open_p2p_group(TENSOR_AXIS, list(mesh.devices.flat))
    try:
        num_wrong = check.num_wrong_elements(mesh, p2p, p2p_gpu, p2p_max_bytes(mesh.size))
    except jax.errors.JaxRuntimeError as error:
        reason = p2p_gpu.timeouts() or str(error)
        raise ConfigError(f"the GPUs do not add up as peers: {reason}. Start with --all-reduce xla.") from error
    if num_wrong == 0:
        return None
    reason = f"{num_wrong} elements of sums were wrong"
    _log.warning("the GPUs do not add up as peers, and XLA's sums are slower: %s", reason)
    return reason


def tpu_kernels(config: ServeConfig, model: ModelConfig, mesh: Mesh) -> Kernels:
    """The kernels of a TPU; its devices need not be there.

    Raises:
      ValueError: they cannot serve this cache; names what they take.
    """
    paged_attention.tpu.check_shapes(
        head_dim=model.head_dim, page_size=config.page_size, dtype=jnp.dtype(serving_dtype(config, model, "tpu"))
    )
    chip = chip_of(mesh.devices.flat[0])
    return Kernels(
        attend=paged_attention.IMPLEMENTATIONS["tpu"],
        write=paged_attention.WRITERS["tpu"],
        is_unrolled=chip is not None and chip.is_unrolled,
    )


def _shape_refusal(config: ServeConfig, model: ModelConfig, num_devices: int) -> str | None:
    """Why the CUDA kernels cannot serve a device's block of the model; None if they can."""
    layer_weights = architecture_of(model).layer_weights
    if layer_weights is None:
        return f"there are no fused kernels for {model.model_type}"
    layout, dtype = model_layout(model, num_devices), jnp.dtype(serving_dtype(config, model, "gpu"))

    def block(weight: nnx.Variable) -> nnx.Variable:
        shape = [
            size // (1 if axis is None else num_devices) for size, axis in zip(weight.shape, weight.axes, strict=True)
        ]
        return weight.replace(jax.ShapeDtypeStruct(tuple(shape), dtype))

    _, abstract = abstract_model(model, layout, dtype)
    is_weight = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    weights = layer_weights(jax.tree.map(block, abstract["layers"], is_leaf=is_weight))
    whole = state_shapes(model, layout, CacheShape(1, config.page_size, 1, 1), dtype).cache.shape
    cache: Any = jax.ShapeDtypeStruct((*whole[:2], whole[2] // num_devices, *whole[3:]), dtype)
    return decode_layers.unsupported_reason(weights, cache)


@functools.cache
def _build_refusal() -> str | None:
    """Why the CUDA kernels cannot be compiled on this host; None if they are there."""
    try:
        build.build()
    except build.KernelBuildError as error:
        return str(error)
    return None
