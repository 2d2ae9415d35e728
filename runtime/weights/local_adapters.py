"""Finds the adapters (LoRA) that `--adapter` names: local directories, or Hugging Face ids, which are downloaded."""

import dataclasses
from pathlib import Path

from ..options.serve_config import ServeConfig
from .hub import download_adapter, is_hub_id
from .locate import check_directory


def with_local_adapters(config: ServeConfig, *, has_weights: bool = True) -> ServeConfig:
    """Returns the options with a directory for each adapter. What is in the hub's cache is not downloaded again.

    Args:
      config: The options.
      has_weights: Whether a download includes the matrices.

    Raises:
      ConfigError: The hub has no such adapter, denies the download, or cannot be reached.
    """
    local = [f"{name}={_directory(path, has_weights)}" for name, path in config.adapter_paths.items()]
    return dataclasses.replace(config, adapter=tuple(local)) if local else config


def _directory(path: str, has_weights: bool) -> str:
    """Returns the directory of an adapter. One that exists comes before an id of the same form, as for models."""
    if not is_hub_id(path) or Path(path).is_dir():
        return path
    downloaded = download_adapter(path, has_weights=has_weights)
    check_directory(downloaded, "adapter")
    return str(downloaded)
