"""Starts JAX's devices as the options ask for them, and says which of them a server uses."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from meshserve.sharding.mesh import claim_gpu_memory, make_mesh, use_cpu_devices, use_dispatch_threads

from ..api.model_config import ModelConfig
from ..options.serve_config import ServeConfig
from ..planning.auto_limits import GPU_MEMORY_FRACTION
from ..planning.tp_choice import choose_tp
from ..program.compile_cache import use_cache


def configure_devices(config: ServeConfig) -> None:
    """Applies the options that JAX must know before its devices start. May be called more than once."""
    if config.cpu_devices:
        use_cpu_devices(config.cpu_devices)
    else:
        claim_gpu_memory(config.memory_fraction or GPU_MEMORY_FRACTION)
        if config.dispatch_threads and (config.tp or _num_gpus()) > 1:
            use_dispatch_threads()
    if config.cache_dir:
        use_cache(Path(config.cache_dir).expanduser())


def _num_gpus() -> int:
    """Returns how many NVIDIA GPUs the machine has, without starting them."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def start_devices(config: ServeConfig, model: ModelConfig) -> tuple[ServeConfig, Mesh]:
    """Starts the devices, and returns the options with the TP size of the server, and its mesh.

    Raises:
      ConfigError: The model or the devices do not allow the TP size.
      ValueError: The devices cannot be taken evenly from all processes.
    """
    configure_devices(config)
    config = dataclasses.replace(config, tp=choose_tp(config, model, jax.devices()))
    return config, make_mesh(config.tp)
