"""Starts JAX's devices as the options ask for them, and says which of them a server uses."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from meshserve.kernels.cuda.user_folder import user_folder
from meshserve.sharding.memory import host_free_bytes
from meshserve.sharding.mesh import (
    claim_gpu_memory,
    limit_pinned_memory,
    make_mesh,
    use_cpu_devices,
    use_dispatch_threads,
)

from ..api.errors import ConfigError
from ..model_files.model_config import ModelConfig
from ..options.serve_config import ServeConfig
from ..plan.tp_choice import choose_tp
from ..program.compile_cache import use_cache
from ..resolve.auto_limits import GPU_MEMORY_FRACTION
from .accelerators import started_devices

_GIB = 1 << 30
_MOVED_BYTES = 24 * _GIB  # the most weights in flight at a time after a change of the TP size
_OTHER_BYTES = 4 * _GIB  # host memory that is not pinned


def configure_devices(config: ServeConfig) -> None:
    """Applies the options that JAX must know before its devices start. May be called more than once.

    Raises:
      ConfigError: JAX already runs in this process, with another number of CPU devices; or no directory for compiled
        programs can be used.
    """
    if config.cpu_devices:
        try:
            use_cpu_devices(config.cpu_devices)
        except RuntimeError:
            raise ConfigError(
                f"cpu_devices is {config.cpu_devices}, but JAX already runs in this process with "
                f"{jax.local_device_count()} device(s). Use the same number, or another process."
            ) from None
    else:
        claim_gpu_memory(config.memory_fraction or GPU_MEMORY_FRACTION)
        if config.host_cache_gib:
            limit_pinned_memory(_pinned_bytes(config.host_cache_gib, host_free_bytes()))
        if config.dispatch_threads and (config.tp or _num_gpus()) > 1:
            use_dispatch_threads()
    if config.cache_dir:
        try:
            use_cache(user_folder(config.cache_dir), is_autotuned=not config.cpu_devices and _num_gpus() > 0)
        except PermissionError as error:
            raise ConfigError(f"cache_dir is {config.cache_dir}: {error}") from None


def _pinned_bytes(host_cache_gib: float, free_bytes: int) -> int:
    """Returns how much host memory jax may pin: the host tier, and what weights on their way to the devices need.

    They need little beside the tier while they are loaded, and more when they are moved by way of the host, in which
    case the tier is empty.
    """
    least_bytes = int((host_cache_gib + 1) * _GIB)
    return max(least_bytes, min(max(least_bytes + _GIB, _MOVED_BYTES), free_bytes - _OTHER_BYTES))


def _num_gpus() -> int:
    """Returns how many NVIDIA GPUs the machine has, without starting them."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def start_devices(config: ServeConfig, model: ModelConfig) -> tuple[ServeConfig, Mesh]:
    """Starts the devices, and returns the options with the TP size of the server, and its mesh.

    Raises:
      ConfigError: The model or the devices do not allow the TP size, or see `started_devices`.
      ValueError: The devices cannot be taken evenly from all processes.
    """
    configure_devices(config)
    config = dataclasses.replace(config, tp=choose_tp(config, model, started_devices()))
    return config, make_mesh(config.tp)
