"""Recognizes the chip of a device: a TPU by jax's name for it, a GPU by its attributes.

The attributes come from the CUDA driver, which this process has loaded with jax's GPU backend, and from jax where the
driver cannot be asked. Where neither knows the bandwidth of the memory, a copy is timed, once.
"""

import ctypes
import functools
import logging
import time
from typing import Any

import jax
import jax.numpy as jnp

from .chip import Chip
from .gpus import GPUAttributes, gpu_of
from .tpus import TPUS

_log = logging.getLogger(__name__)

# Values of CUdevice_attribute.
_MULTIPROCESSORS, _CLOCK_KHZ, _MEMORY_CLOCK_KHZ, _BUS_BITS, _MAJOR, _MINOR = 16, 13, 36, 37, 75, 76
_COPIED_BYTES = 512 << 20  # more than any L2 cache holds
_NUM_COPIES = 5


def chip_of(device: jax.Device) -> Chip | None:
    """Returns the chip of an accelerator, or None for a CPU or an unknown TPU.

    The first call for a GPU whose memory bandwidth is unknown takes some milliseconds of its time.
    """
    if device.platform == "gpu":
        return gpu_of(_attributes(device))
    return next((chip for chip in TPUS if chip.kind == device.device_kind), None)


def _attributes(device: jax.Device) -> GPUAttributes:
    """Returns what is known about a GPU, which may be absent or belong to another process of the same kind of host."""
    local = _local_device(device)
    found = _driver_attributes(int(local.local_hardware_id)) if local is not None else None
    if found is None:
        found = GPUAttributes(
            name=device.device_kind,
            compute_capability=_parsed(getattr(device, "compute_capability", "")),
            num_multiprocessors=int(getattr(device, "core_count", 0)),
        )
    # Processes would measure different speeds, and then plan different steps.
    if local is not None and not found.bytes_per_second and jax.process_count() == 1:
        found = found._replace(bytes_per_second=_timed_copy(local))
    return found


def _local_device(device: Any) -> jax.Device | None:
    """Returns the device if this process has it, or else one of the same kind that it has."""
    is_local = isinstance(device, jax.Device) and device.platform == jax.default_backend()
    kinds = [each for each in jax.local_devices() if each.device_kind == device.device_kind] if is_local else []
    return device if device in kinds else next(iter(kinds), None)


def _parsed(capability: object) -> tuple[int, int] | None:
    """Returns a compute capability such as "9.0" as numbers, or None if it is none: another vendor's GPU."""
    major, _, minor = str(capability).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


@functools.cache
def _driver_attributes(ordinal: int) -> GPUAttributes | None:
    """Asks the CUDA driver about a GPU of this process; returns None if it cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if driver.cuDeviceGetName(name, len(name), device) or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device):
        return None

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return 0 if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    return GPUAttributes(
        name=name.value.decode(errors="replace"),
        compute_capability=(attribute(_MAJOR), attribute(_MINOR)),
        memory_bytes=total.value,
        num_multiprocessors=attribute(_MULTIPROCESSORS),
        clock_hz=1e3 * attribute(_CLOCK_KHZ),
        bytes_per_second=2 * 1e3 * attribute(_MEMORY_CLOCK_KHZ) * attribute(_BUS_BITS) / 8,  # two transfers a cycle
    )


@functools.cache
def _timed_copy(device: jax.Device) -> float:
    """Returns the bytes per second that a copy within a device's memory reads and writes."""
    source = jnp.zeros(_COPIED_BYTES, jnp.uint8, device=device)
    copy = jax.jit(lambda values: values + 1)
    copy(source).block_until_ready()  # compiles
    seconds = []
    for _ in range(_NUM_COPIES):
        start = time.perf_counter()
        copy(source).block_until_ready()
        seconds.append(time.perf_counter() - start)
    speed = 2 * _COPIED_BYTES / min(seconds)
    _log.info("%s: its memory copies %.0f GB/s", device.device_kind, speed / 1e9)
    return speed
