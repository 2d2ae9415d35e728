"""Where a model lies: the embedded one, a local directory, or one in an object store."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from meshserve.deploy import demo
from meshserve.sharding.storage import as_path, is_remote

from .errors import ConfigError

DEMO_MODEL = "demo"
_MAX_SMALL_FILE_BYTES = 64 * 2**20  # tokenizers take 11 MB
_SMALL_FILE_SUFFIXES = (".json", ".jinja", ".txt")


@dataclass(frozen=True)
class ModelFiles:
    """`small` holds config.json and the tokenizer and is local, `weights` the weights: the same directory unless the
    model is remote."""

    small: Path
    weights: epath.Path


def find_model(model: str) -> ModelFiles:
    """The directory that --model names; the small files of a remote one are copied to a temporary directory.

    Raises:
      ConfigError: no model is named, or there is no such directory.
      CheckpointError: it is remote and cannot be reached.
    """
    if not model:
        raise ConfigError("no model is named. Pass --model with a model directory, or --model demo.")
    if model == DEMO_MODEL:
        directory = Path(demo.__file__).with_name("model")
        return ModelFiles(directory, epath.Path(directory))
    path = as_path(model)
    if not path.is_dir():
        raise ConfigError(f"--model {model}: no such directory. Download the model first, or use --model demo.")
    return ModelFiles(_copied(path) if is_remote(model) else Path(path), path)


def _copied(remote: epath.Path) -> Path:
    local = Path(tempfile.mkdtemp(prefix="meshserve-"))
    for path in remote.iterdir():
        is_small = path.name.endswith(_SMALL_FILE_SUFFIXES) and path.stat().length <= _MAX_SMALL_FILE_BYTES
        if is_small and not path.name.endswith(".index.json"):
            (local / path.name).write_bytes(path.read_bytes())
    return local
