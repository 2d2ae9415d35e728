"""Where a model lies: the embedded one, a local directory, or one in an object store; or a size without files."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from meshserve.deploy import demo
from meshserve.sharding.checkpoints.storage import as_path, is_remote

from ..api.errors import ConfigError
from .registry import is_published, published_config

DEMO_MODEL = "demo"
_MAX_SMALL_FILE_BYTES = 64 * 2**20  # tokenizers take 11 MB
_SMALL_FILE_SUFFIXES = (".json", ".jinja", ".txt")


@dataclass(frozen=True)
class ModelFiles:
    """`small` holds config.json and the tokenizer and is local, `weights` the weights: the same directory unless the
    model is remote."""

    small: Path
    weights: epath.Path | None  # None: they are made up


def find_model(model: str, *, random_weights: bool = False) -> ModelFiles:
    """The directory that --model names; the small files of a remote one are copied to a temporary directory.

    With `random_weights` none need be there, and a published size will do: it gets the demo model's tokenizer.

    Raises:
      ConfigError: no model is named, or there is no such directory.
      CheckpointError: it is remote and cannot be reached.
    """
    if not model:
        raise ConfigError("no model is named. Pass --model with a model directory, or --model demo.")
    if random_weights and is_published(model):
        return ModelFiles(_made_up(model), None)
    if model == DEMO_MODEL:
        return ModelFiles(_demo(), None if random_weights else epath.Path(_demo()))
    path = as_path(model)
    if not path.is_dir():
        raise ConfigError(f"--model {model}: no such directory. Download the model first, or use --model demo.")
    return ModelFiles(_copied(path) if is_remote(model) else Path(path), None if random_weights else path)


def _demo() -> Path:
    return Path(demo.__file__).with_name("model")


def _made_up(size: str) -> Path:
    """Of a published size, beside the demo model's tokenizer."""
    local = Path(tempfile.mkdtemp(prefix="meshserve-"))
    for path in _demo().iterdir():
        if path.name.endswith(_SMALL_FILE_SUFFIXES):
            shutil.copy(path, local)
    (local / "config.json").write_text(json.dumps(published_config(size)))
    return local


def _copied(remote: epath.Path) -> Path:
    local = Path(tempfile.mkdtemp(prefix="meshserve-"))
    for path in remote.iterdir():
        is_small = path.name.endswith(_SMALL_FILE_SUFFIXES) and path.stat().length <= _MAX_SMALL_FILE_BYTES
        if is_small and not path.name.endswith(".index.json"):
            (local / path.name).write_bytes(path.read_bytes())
    return local
