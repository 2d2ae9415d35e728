"""The operations on Hopper GPUs of one host, by plain stores over NVLink, not by multicast: see ../cuda/peers.cuh."""

import ctypes
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build

from . import MAX_BYTES, P2PGroup, takes_sum

PATIENCE_SECONDS = 30.0  # a rank waits this long for another before it stops the program; the first step is slow
_MAX_ERROR_BYTES = 1000

_opened: list[P2PGroup] = []  # by this process


class P2PError(RuntimeError):
    """The devices cannot reach each other's memory; the message says why."""


def open_p2p_group(axis: str, devices: Sequence[jax.Device], *, patience_seconds: float = PATIENCE_SECONDS) -> P2PGroup:
    """Gives the devices, by rank along the mesh axis, memory that the others write to. Call it before a program that
    uses it runs; a second time it changes nothing.

    It takes 8 MiB a rank on each device, and for long sums 64 MiB on each of two or 96 MiB on each of four.

    Raises:
      P2PError: they are no Hopper GPUs, or of several processes, or have no peer access.
      KernelBuildError: the CUDA kernels cannot be built here.
    """
    reason = build.unavailable_reason(devices[0])
    if reason is not None:
        raise P2PError(reason)
    library = build.load()
    if any(device.process_index != jax.process_index() for device in devices):
        raise P2PError("the devices belong to several processes; peers must be of one")
    ordinals = tuple(int(device.local_hardware_id) for device in devices)
    error = ctypes.create_string_buffer(_MAX_ERROR_BYTES)
    patience = ctypes.c_double(patience_seconds)
    if not library.meshserve_open_peers(_array(ordinals), len(ordinals), patience, error, _MAX_ERROR_BYTES):
        raise P2PError(f"GPUs {ordinals} cannot be peers: {error.value.decode()}")
    p2p = P2PGroup(axis=axis, ordinals=ordinals)
    if p2p not in _opened:
        _opened.append(p2p)
    return p2p


def complaint() -> str | None:
    """Which GPU waited in vain for which, if one did, of all peers that this process has opened; what ran there has
    failed then, and no program can run on these GPUs any more. GPUs are named as CUDA numbers them."""
    waits = [
        f"GPU {ordinals[rank]} for GPU {ordinals[awaited - 1]}"
        for ordinals in (p2p.ordinals for p2p in _opened)
        for rank in range(len(ordinals))
        if (awaited := build.load().meshserve_stalled_peer(_array(ordinals), len(ordinals), rank))
    ]
    return f"waited in vain: {', '.join(waits)}" if waits else None


def attribute(p2p: P2PGroup | None) -> np.ndarray:
    """As the calls take it; None is one device alone."""
    return np.array([0] if p2p is None else p2p.ordinals, np.int32)


def p2p_all_reduce(x: jax.Array, p2p: P2PGroup) -> jax.Array:
    """See `P2POperations`."""
    num_ranks = len(p2p.ordinals)
    if x.dtype != jnp.bfloat16 or not takes_sum(x.nbytes, num_ranks):
        raise ValueError(
            f"a sum of {x.dtype}{list(x.shape)} over {num_ranks} GPUs; it takes bfloat16 in multiples of 8 bytes; more "
            f"than {MAX_BYTES} bytes over 2 or 4 GPUs alone, in multiples of 16 bytes for each."
        )
    return _call("meshserve_peer_sum", x, x.shape, p2p)


def p2p_all_gather(x: jax.Array, p2p: P2PGroup) -> jax.Array:
    """See `P2POperations`."""
    if x.dtype.itemsize != 4 or x.nbytes % 8 or x.nbytes > MAX_BYTES:
        raise ValueError(
            f"an exchange of {x.dtype}{list(x.shape)}; it takes elements of 4 bytes, a multiple of 8 bytes and at most "
            f"{MAX_BYTES} of them."
        )
    return _call("meshserve_peer_exchange", x, (len(p2p.ordinals), *x.shape), p2p)


def _call(name: str, x: jax.Array, shape: tuple[int, ...], p2p: P2PGroup) -> jax.Array:
    build.load()
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, x.dtype))(x, ordinals=attribute(p2p))


def _array(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int * len(values))(*values)
