"""Which kernels serve: chosen once at start-up from the devices, the model's shapes and the config, and logged."""

import logging
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from meshserve.kernels import decode_layers, paged_attention
from meshserve.kernels.cuda.build import KernelBuildError
from meshserve.kernels.peers import Peers
from meshserve.kernels.peers import gpu as peers_gpu
from meshserve.sharding.mesh import TENSOR_AXIS, named_sharding
from meshserve.sharding.targets import chip_of

from .config import ServeConfig
from .model import Kernels, layer_weights
from .step import CACHE_AXES, DeviceState

_log = logging.getLogger(__name__)


def choose_kernels(
    config: ServeConfig,
    mesh: Mesh,
    params: nnx.State,
    state: DeviceState[jax.ShapeDtypeStruct],
    *,
    are_devices_here: bool = True,
) -> Kernels:
    """The kernels that `attention` and `decode_layers` name. "auto" takes the TPU's own on a TPU
    and XLA's path elsewhere. Devices that are not here can have programs compiled for them, but not be opened as peers.

    The CUDA kernels must be named: under mixed load they have ended in an illegal instruction whose cause is not known
    yet (docs/performance.md), and a server must not.

    Raises:
      ValueError: a named implementation cannot run here.
    """
    device = mesh.devices.flat[0]
    platform = device.platform
    if platform == "tpu" and config.attention in ("auto", "tpu"):
        return tpu_kernels(mesh, state)
    is_gpu = platform == "gpu"
    reason = _cuda_refusal(mesh, params, state)
    attention = "reference" if config.attention == "auto" else config.attention
    decode = "off" if config.decode_layers == "auto" else config.decode_layers
    for option, chosen in (("attention", attention), ("decode_layers", decode)):
        if chosen == "cuda" and reason is not None:
            raise ValueError(f"--{option.replace('_', '-')} cuda cannot serve this model here: {reason}.")
    if is_gpu and reason is None and "cuda" not in (attention, decode):
        _log.warning("XLA's kernels serve; try the faster CUDA ones with --attention cuda --decode-layers cuda")
    peers = _peers(mesh, are_devices_here) if config.all_reduce == "peers" else None
    _log.info("attention: %s; decode layers: %s; sums: %s", attention, decode, "xla" if peers is None else "peers")
    return Kernels(
        attend=paged_attention.implementation(attention, device),
        write=paged_attention.WRITERS.get(attention, paged_attention.write_kv),
        decode=None if decode == "off" else decode_layers.implementation(decode, device),
        is_unrolled=is_gpu,
        has_statistics_apart=is_gpu,
        has_library_products=config.products == "library",
        peers=peers,
        peer_operations=peers_gpu if peers is not None else None,
    )


def _peers(mesh: Mesh, are_devices_here: bool) -> Peers | None:
    """The mesh's devices as peers; one device alone needs none.

    Raises:
      ValueError: they cannot be.
    """
    if mesh.size == 1:
        return None
    if not are_devices_here:
        return Peers(axis=TENSOR_AXIS, ordinals=tuple(range(mesh.size)))
    try:
        return peers_gpu.open_peers(TENSOR_AXIS, list(mesh.devices.flat))
    except (peers_gpu.PeersError, KernelBuildError) as error:
        raise ValueError(f"--all-reduce peers cannot serve here: {error}. Take xla.") from None


def tpu_kernels(mesh: Mesh, state: DeviceState[jax.ShapeDtypeStruct]) -> Kernels:
    """The kernels of a TPU; its devices need not be there.

    Raises:
      ValueError: they cannot serve this cache; names what they take.
    """
    *_, page_size, head_dim = state.cache.shape
    paged_attention.tpu.check_shapes(head_dim=head_dim, page_size=page_size, dtype=state.cache.dtype)
    chip = chip_of(mesh.devices.flat[0])
    return Kernels(
        attend=paged_attention.IMPLEMENTATIONS["tpu"],
        write=paged_attention.WRITERS["tpu"],
        is_unrolled=chip is not None and chip.is_unrolled,
    )


def _cuda_refusal(mesh: Mesh, params: nnx.State, state: DeviceState[jax.ShapeDtypeStruct]) -> str | None:
    """Why the CUDA kernels cannot serve these shapes on these devices; None if they can."""
    reason = paged_attention.gpu.unavailable_reason(mesh.devices.flat[0])
    if reason is not None:
        return reason

    def block(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)

    weights = jax.tree.map(block, layer_weights(params["layers"]))
    cache_shape = named_sharding(mesh, CACHE_AXES).shard_shape(state.cache.shape)
    cache: Any = jax.ShapeDtypeStruct(cache_shape, state.cache.dtype)
    return decode_layers.unsupported_reason(weights, cache)
