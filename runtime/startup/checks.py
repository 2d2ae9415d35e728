"""What `meshserve serve` checks before it opens a port: the port, host memory, the model's config.json, TP size."""

from pathlib import Path

from meshserve.sharding.checkpoints.storage import is_remote

from ..api.errors import ConfigError
from ..api.model_config import ModelConfig
from ..options.model_defaults import context_tokens
from ..options.serve_config import ServeConfig
from ..planning.tp_choice import check_tp
from ..server.ports import check_free
from ..weights.locate import DEMO_MODEL, model_directory
from ..weights.model_task import with_task
from ..weights.registry import is_published, named_model, read_model


def check_before_listening(config: ServeConfig) -> None:
    """Checks what can be checked without weights, so that a mistake is not found after minutes.

    The devices of a process that serves alone are started; those of a cluster start once all processes have met.

    Raises:
      MeshserveError: The port is in use, or the model or the devices do not allow the options.
    """
    check_free(config.host, config.port)
    _check_host_memory(config)
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
    return with_task(model, config.task, Path(path))
