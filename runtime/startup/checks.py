"""What `meshserve serve` checks before it opens a port: ports, host memory, config.json, chat template, TP size."""

import os
from pathlib import Path

from meshserve.sharding.checkpoints.storage import is_remote

from ..api.errors import ConfigError
from ..api.tasks import GENERATE
from ..host_cache.block_files import expanded, open_directory
from ..model_files.model_config import ModelConfig
from ..options.listening_ports import listening_ports
from ..options.serve_config import ServeConfig
from ..plan.tp_choice import check_tp
from ..resolve.model_defaults import context_tokens
from ..server.ports import check_free
from ..text.chat_template import ChatTemplate
from ..weights.local_adapters import with_local_adapters
from ..weights.locate import DEMO_MODEL, model_directory, model_name
from ..weights.model_task import with_task
from ..weights.registry import is_published, named_model, read_model


def check_before_listening(config: ServeConfig) -> None:
    """Checks what can be checked without weights, so that a mistake is not found after minutes.

    The devices of a process that serves alone are started; those of a cluster start once all processes have met.

    Raises:
      MeshserveError: A port is in use, host_cache_dir cannot be used, or the model or the devices do not allow the
        options.
    """
    for each in listening_ports(config):
        check_free(each.host, each.port, each.option)
    _check_host_memory(config)
    _check_adapters(config)
    if config.host_cache_dir:
        os.close(open_directory(expanded(config.host_cache_dir)))
    model = _model(config)
    if model is None:
        return
    context_tokens(config, model)
    if config.coordinator:
        if config.tp:
            check_tp(config.tp, model, max(config.tp, model.num_query_heads), "devices")
        return
    from .devices import start_devices  # not at module level: importing jax takes seconds

    start_devices(config, model)


def _check_adapters(config: ServeConfig) -> None:
    """
    Raises:
      ConfigError: An adapter has the model's name, or cannot be downloaded, or see `adapter_roots`.
    """
    adapter_roots(config)
    served = config.served_name or model_name(config.model)
    for name in config.adapter_paths:
        if name in (served, served.rpartition("/")[2]):
            raise ConfigError(f"adapter gives the name {name}, which is the model's. Choose another name.")
    with_local_adapters(config)


def adapter_roots(config: ServeConfig) -> tuple[Path, ...]:
    """Returns the directories below which adapters may be loaded while the server runs.

    Raises:
      ConfigError: One is no directory.
    """
    roots = tuple(Path(name.strip()).expanduser() for name in config.adapter_root.split(",") if name.strip())
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"--adapter-root {root} is no directory. Create it, or name another one.")
    return roots


def _check_host_memory(config: ServeConfig) -> None:
    """
    Raises:
      ConfigError: The machine does not have the memory that the host cache may take.
    """
    if not config.host_cache_gib:
        return
    from meshserve.sharding.memory import host_free_bytes  # not at module level: importing jax takes seconds

    free_gib = host_free_bytes() / (1 << 30)
    if config.host_cache_gib > free_gib:
        raise ConfigError(
            f"host_cache_gib is {config.host_cache_gib:g}, but this process can still allocate {free_gib:.1f} GiB of "
            "host memory. Lower it, or give the machine or container more."
        )


def _model(config: ServeConfig) -> ModelConfig | None:
    """Returns the config of the model, without weights; None for a remote directory, which is read once, later."""
    if config.random_weights and is_published(config.model):
        model = named_model(config.model, config.quantize, fp8_head=config.fp8_head)
        return with_task(model, config.task, Path(model_directory(DEMO_MODEL)))
    path = model_directory(config.model, revision=config.revision, has_weights=False)
    if is_remote(path):
        return None
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"--model {config.model}: {path} has no config.json, so it is not a model directory. Pass one in Hugging "
            "Face or Orbax form, a Hugging Face id such as Qwen/Qwen3-8B, or demo."
        )
    model = read_model(Path(path) / "config.json", config.quantize, fp8_head=config.fp8_head)
    if config.strict_config:
        model.notes.check_empty()
    model = with_task(model, config.task, Path(path))
    if model.task == GENERATE:
        ChatTemplate(Path(path)).check()
    return model
