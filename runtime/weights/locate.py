"""Finds a model: the embedded one, a local or remote directory, a Hugging Face id, or a published size."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from meshserve.sharding.checkpoints.storage import as_path, file_bytes, is_remote
from meshserve.sharding.guarded_files import check_regular_files

from ..api.errors import ConfigError
from .hub import download_model, is_hub_id
from .registry import is_published, published_config

DEMO_MODEL = "demo"
DEMO_HEAD = "demo-head"  # for --draft-model: proposes draft tokens for the demo model
_EMBEDDED = Path(__file__).with_name("embedded")  # a model directory for each of these names
DEMO_DIRECTORY = _EMBEDDED / DEMO_MODEL
_MAX_SMALL_FILE_BYTES = 64 * 2**20  # tokenizers have 11 MB
# Folders of a model whose files libraries open by their names.
_OPENED_FOLDERS = ("weights", "digests", "additional_chat_templates")
_SMALL_FILE_SUFFIXES = (".json", ".jinja", ".txt")


@dataclass(frozen=True)
class ModelFiles:
    """Locations of a model's files. Both are the same directory unless the model is remote.

    `small` is local and contains config.json and the tokenizer. `weights` contains the weights; None for random
    weights.
    """

    small: Path
    weights: epath.Path | None


def find_model(model: str, *, revision: str = "", random_weights: bool = False) -> ModelFiles:
    """Finds the files that `--model` names. The small files of a remote directory are copied to a temporary directory.

    With `random_weights`, no weights are needed or downloaded, and a published size is accepted too: it gets the demo
    model's tokenizer.

    Raises:
      Errors of `model_directory`.
    """
    if random_weights and is_published(model):
        return ModelFiles(_made_up(model), None)
    path = model_directory(model, revision=revision, has_weights=not random_weights)
    return ModelFiles(_copied(path) if is_remote(path) else Path(path), None if random_weights else path)


def model_directory(model: str, *, revision: str = "", has_weights: bool = True) -> epath.Path:
    """Returns the directory that `--model` names, downloading the model first if it is a Hugging Face id.

    Args:
      model: Value of `--model`.
      revision: Branch, tag or commit of a model on the hub. "" is the main branch.
      has_weights: Whether a download includes the weights.

    Raises:
      ConfigError: No model is given, there is no such directory, something in it is no file, or the model cannot be
        downloaded.
      UnsupportedModelError: meshserve does not support the hub's model.
      CheckpointError: The directory is remote and cannot be reached.
    """
    if not model:
        raise ConfigError("no model given. Pass --model with a model directory, an id such as Qwen/Qwen3-8B, or demo.")
    path = epath.Path(_EMBEDDED / model) if model in (DEMO_MODEL, DEMO_HEAD) else as_path(model)
    if is_hub_id(model) and not path.is_dir():
        downloaded = download_model(model, revision=revision, has_weights=has_weights)
        check_directory(downloaded, "model")
        return epath.Path(downloaded)
    if not path.is_dir():
        raise ConfigError(
            f"--model {model}: no such directory. Pass a model directory, a Hugging Face id such as "
            "Qwen/Qwen3-8B, or --model demo."
        )
    if not is_remote(path):
        check_directory(Path(path), "model")
    if revision:
        raise ConfigError(f"--revision {revision}: only models of the Hugging Face hub have one. Omit it for {path}.")
    return path


def check_directory(directory: Path, kind: str) -> None:
    """Checks what libraries will open by its name: a FIFO would make them wait for ever, a link may lead anywhere.

    Args:
      directory: A local directory.
      kind: What it is of, for the message.

    Raises:
      ConfigError: Something in the directory is neither a file nor a directory, or leads out of the directory.
    """
    try:
        check_regular_files(directory, _OPENED_FOLDERS)
    except OSError as error:
        raise ConfigError(f"the {kind} directory {directory} cannot be used: {error.filename}: {error}.") from None


def model_name(model: str) -> str:
    """Returns the name of the model that `--model` names: a Hugging Face id as it is given, else the directory's name.

    A directory that has the form of an id is named like one, as by vLLM.
    """
    return model if is_hub_id(model) else Path(os.path.abspath(model)).name


def _made_up(size: str) -> Path:
    """Creates a directory with the config.json of a published size and the demo model's tokenizer."""
    local = Path(tempfile.mkdtemp(prefix="meshserve-"))
    for path in DEMO_DIRECTORY.iterdir():
        if path.name.endswith(_SMALL_FILE_SUFFIXES):
            shutil.copy(path, local)
    (local / "config.json").write_text(json.dumps(published_config(size)))
    return local


def _copied(remote: epath.Path) -> Path:
    """Copies the small files of a remote directory to a temporary directory and returns it."""
    local = Path(tempfile.mkdtemp(prefix="meshserve-"))
    for path in remote.iterdir():
        is_small = path.name.endswith(_SMALL_FILE_SUFFIXES) and file_bytes(path) <= _MAX_SMALL_FILE_BYTES
        if is_small and not path.name.endswith(".index.json"):
            (local / path.name).write_bytes(path.read_bytes())
    for folder in pooling_folders(remote):
        (local / folder.name).mkdir()
        (local / folder.name / "config.json").write_bytes((folder / "config.json").read_bytes())
    return local


def pooling_folders(directory: epath.Path) -> list[epath.Path]:
    """Returns the folders of an embedding model that say how it pools; see `model_task`."""
    folders = [path for path in directory.iterdir() if path.name.endswith("_Pooling")]
    return [path for path in folders if (path / "config.json").exists()]
