"""The mesh: which devices serve, and where each logical axis of an array lies on them."""

import importlib.util
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"

# Logical axis of a parameter or cache -> mesh axis. What is not named here is replicated.
RULES = {"vocab": TENSOR_AXIS, "kv_heads": TENSOR_AXIS, "query_heads": TENSOR_AXIS, "mlp": TENSOR_AXIS}


def use_cpu_devices(num_devices: int) -> None:
    """Makes this process serve on virtual CPU devices. Call it before anything else asks jax for devices.

    Raises:
      RuntimeError: jax has already started its backends.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def use_dispatch_threads() -> None:
    """Has XLA dispatch to each GPU from a thread of its own: 0.09 ms of host time a call on four GPUs, not 2.4
    (docs/log). Call it before anything asks jax for devices; without jax's CUDA plugin it does nothing.
    """
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, plugins)):
        jax.config.update("jax_pjrt_client_create_options", {"use_tfrt_gpu_client": True})


def make_mesh(tensor_parallelism: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `tensor_parallelism` devices along one axis.

    A whole TPU slice is laid along its wires by jax's own rules. Of several processes each takes part with as many.

    Raises:
      ValueError: there are too few devices.
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
    """All devices, or, if only some are wanted, the first of each process."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    num_processes = len(by_process)
    if num_processes == 1 or num_devices >= len(devices):
        return list(devices)
    if num_devices % num_processes:
        raise ValueError(
            f"tp is {num_devices} and there are {num_processes} processes; each takes part with as many devices as the "
            f"others. Choose a multiple of {num_processes}."
        )
    count = num_devices // num_processes
    return [device for process in sorted(by_process) for device in by_process[process][:count]]


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Where an array with these logical axes lies on the mesh."""
    return PartitionSpec(*(RULES[axis] if axis is not None else None for axis in axes))


def named_sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))
