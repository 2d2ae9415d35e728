"""Builds the device mesh and maps the logical axes of arrays to its axes."""

import importlib.util
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # read by XLA when its GPU backend starts

# Logical axis of a parameter or cache -> mesh axis. An axis of None is replicated.
RULES = {
    "vocab": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "query_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "experts": TENSOR_AXIS,
    "features": TENSOR_AXIS,
}


def use_cpu_devices(num_devices: int) -> None:
    """Makes this process use virtual CPU devices. Call it before anything else asks jax for devices.

    Raises:
      RuntimeError: jax has already started its backends with another number of devices.
    """
    jax.config.update("jax_platforms", "cpu")
    if jax.config.values["jax_num_cpu_devices"] != num_devices:
        jax.config.update("jax_num_cpu_devices", num_devices)


def claim_gpu_memory(fraction: float) -> None:
    """Makes JAX allocate this share of each GPU's memory when its backend starts, instead of three quarters.

    Takes precedence over JAX's environment variable. Has no effect on other devices, or once the backend has started.
    """
    if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13)):
        _add_client_option("memory_fraction", fraction)


def limit_pinned_memory(num_bytes: int) -> None:
    """Makes JAX pin at most so much host memory for its GPUs, in whole GiB, instead of 64. Call it before they start.

    JAX's allocator pins ever larger regions, each twice as large as the last, up to this limit. A limit that is set in
    the environment already takes precedence.
    """
    os.environ.setdefault(_PINNED_LIMIT, str(num_bytes >> 30))


def use_dispatch_threads() -> None:
    """Makes XLA dispatch to each GPU from a separate thread. Call it before anything asks jax for devices.

    On four GPUs this reduces the host time per call from 2.4 to 0.09 ms. Without jax's CUDA plugin it does
    nothing.
    """
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, plugins)):
        _add_client_option("use_tfrt_gpu_client", True)


def _add_client_option(name: str, value: object) -> None:
    """Sets an option of the GPU backend that has not started yet, beside those set before."""
    options = jax.config.values["jax_pjrt_client_create_options"]
    known = options if isinstance(options, dict) else {}
    jax.config.update("jax_pjrt_client_create_options", {**known, name: value})


def make_mesh(tensor_parallelism: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of the first `tensor_parallelism` devices along one axis.

    A whole TPU slice is ordered along its physical links by jax's `create_device_mesh`. With several processes, each
    contributes the same number of devices.

    Raises:
      ValueError: there are too few devices, or they cannot be taken evenly from all processes.
    """
    devices = _of_every_process(tensor_parallelism, jax.devices()) if devices is None else devices
    if len(devices) < tensor_parallelism:
        raise ValueError(
            f"tp is {tensor_parallelism} but jax sees {len(devices)} {devices[0].platform} device(s). "
            "Lower tp, or serve on virtual devices with --cpu-devices."
        )
    if devices[0].platform == "tpu" and len(devices) == tensor_parallelism > 1:
        # Without the flag a mesh axis must be a whole number of the slice's physical axes.
        order = mesh_utils.create_device_mesh((tensor_parallelism,), devices, allow_split_physical_axes=True)
        return Mesh(order, (TENSOR_AXIS,))
    return Mesh(np.asarray(devices[:tensor_parallelism]), (TENSOR_AXIS,))


def _of_every_process(num_devices: int, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns all devices, or, if fewer are needed, the first ones of each process in equal numbers."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    num_processes = len(by_process)
    if num_processes == 1 or num_devices >= len(devices):
        return list(devices)
    if num_devices % num_processes:
        raise ValueError(
            f"tp is {num_devices} and there are {num_processes} processes, which must all use the same number of "
            f"devices. Choose a multiple of {num_processes}."
        )
    count = num_devices // num_processes
    return [device for process in sorted(by_process) for device in by_process[process][:count]]


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Returns the partition spec of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] if axis is not None else None for axis in axes))


def named_sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))
