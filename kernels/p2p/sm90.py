"""P2P operations on the Hopper GPUs of one host, by plain stores over NVLink, no multicast: see ../cuda/collectives."""

import ctypes
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build

from .contract import MAX_BYTES, P2PGroup, P2PShapes, takes_sum

PATIENCE_SECONDS = 30.0  # how long a rank waits for another before it stops the program; the first step is slow
_MAX_ERROR_BYTES = 1000

_opened: list[P2PGroup] = []  # groups that this process has opened


class P2PError(RuntimeError):
    """The devices cannot access each other's memory; the message says why."""


def unsupported_shapes(shapes: P2PShapes) -> str | None:
    """Returns why sums over a mesh are not supported, or None if they are."""
    if not shapes.is_one_process:
        return "the devices belong to several processes; P2P needs all of them in one"
    return None if shapes.dtype == jnp.bfloat16 else f"sums are {shapes.dtype}; bfloat16 is needed"


def open_p2p_group(axis: str, devices: Sequence[jax.Device], *, patience_seconds: float = PATIENCE_SECONDS) -> P2PGroup:
    """Allocates memory on each device that the other devices write to. Further calls change nothing.

    Call it before a program that uses the group runs. It allocates 8 MiB per rank on each device, plus memory for
    two-shot sums: 64 MiB on each of two devices, or 96 MiB on each of four.

    Args:
      axis: the mesh axis along which the devices are ranked.
      devices: the devices in rank order.
      patience_seconds: how long a rank waits for another before it stops the program.

    Raises:
      P2PError: the devices are not Hopper GPUs, belong to several processes, or have no peer access.
      KernelBuildError: the CUDA kernels cannot be built on this host.
    """
    reason = build.unavailable_reason(devices[0])
    if reason is not None:
        raise P2PError(reason)
    library = build.load()
    if any(device.process_index != jax.process_index() for device in devices):
        raise P2PError("the devices belong to several processes; P2P needs all of them in one")
    ordinals = tuple(int(device.local_hardware_id) for device in devices)
    error = ctypes.create_string_buffer(_MAX_ERROR_BYTES)
    patience = ctypes.c_double(patience_seconds)
    if not library.meshserve_open_p2p_group(_array(ordinals), len(ordinals), patience, error, _MAX_ERROR_BYTES):
        raise P2PError(f"GPUs {ordinals} cannot open P2P memory: {error.value.decode()}")
    p2p = P2PGroup(axis=axis, ordinals=ordinals)
    if p2p not in _opened:
        _opened.append(p2p)
    return p2p


def timeouts() -> str | None:
    """Returns which GPUs timed out waiting for which others, over all groups that this process has opened.

    After a timeout the running program has failed, and no program can run on these GPUs any more. GPUs are named by
    their CUDA ordinals.

    Returns:
      A message, or None if no GPU has timed out.
    """
    waits = [
        f"GPU {ordinals[rank]} waited for GPU {ordinals[awaited - 1]}"
        for ordinals in (p2p.ordinals for p2p in _opened)
        for rank in range(len(ordinals))
        if (awaited := build.load().meshserve_stalled_rank(_array(ordinals), len(ordinals), rank))
    ]
    return f"P2P timeout: {', '.join(waits)}" if waits else None


def attribute(p2p: P2PGroup | None) -> np.ndarray:
    """Returns the value of a call's `ordinals` attribute; None means a single device."""
    return np.array([0] if p2p is None else p2p.ordinals, np.int32)


def p2p_all_reduce(x: jax.Array, p2p: P2PGroup) -> jax.Array:
    """See `P2POperations`."""
    num_ranks = len(p2p.ordinals)
    if x.dtype != jnp.bfloat16 or not takes_sum(x.nbytes, num_ranks):
        raise ValueError(
            f"the P2P all-reduce got {x.dtype}{list(x.shape)} over {num_ranks} GPUs. It takes bfloat16 in multiples of "
            f"8 bytes; above {MAX_BYTES} bytes, only over 2 or 4 GPUs and in multiples of 16 bytes per GPU."
        )
    return _call("meshserve_p2p_all_reduce", x, x.shape, p2p)


def p2p_all_gather(x: jax.Array, p2p: P2PGroup) -> jax.Array:
    """See `P2POperations`."""
    if x.dtype.itemsize != 4 or x.nbytes % 8 or x.nbytes > MAX_BYTES:
        raise ValueError(
            f"the P2P all-gather got {x.dtype}{list(x.shape)}. It takes 4-byte elements, in multiples of 8 bytes "
            f"and at most {MAX_BYTES} bytes."
        )
    return _call("meshserve_p2p_all_gather", x, (len(p2p.ordinals), *x.shape), p2p)


def _call(name: str, x: jax.Array, shape: tuple[int, ...], p2p: P2PGroup) -> jax.Array:
    build.load()
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, x.dtype))(x, ordinals=attribute(p2p))


def _array(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int * len(values))(*values)
