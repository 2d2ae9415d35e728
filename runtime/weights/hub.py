"""Downloads a model or an adapter that an option names by its Hugging Face id, such as Qwen/Qwen3-8B.

Uses `huggingface_hub` with its conventions: progress bar, cache (HF_HOME), token (HF_TOKEN or `hf auth login`),
alternative endpoint (HF_ENDPOINT) and offline mode (HF_HUB_OFFLINE=1).
"""

import http
import logging
import re
from pathlib import Path

from ..api.errors import ConfigError, UnsupportedModelError
from .registry import read_model

_log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_SMALL_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
_WEIGHT_PATTERN = "*.safetensors"
_SUBFOLDERS = "*/*"  # other formats of the same model, such as onnx/model.onnx
_POOLING_PATTERN = "*_Pooling/config.json"  # see `model_task`
_ADAPTER_PATTERNS = ("adapter_config.json", "adapter_model.safetensors")
_SET_HOME = "Set HF_HOME to a directory of this user."


def is_hub_id(model: str) -> bool:
    """Returns whether a name has the form of a hub model id, organization/name.

    A local directory can have this form too.
    """
    return _ID.fullmatch(model) is not None


def download_model(model_id: str, *, revision: str, has_weights: bool) -> Path:
    """Downloads the files of a model directory that are not cached yet and returns that directory.

    config.json is downloaded first, so that an unsupported model is rejected before its weights are downloaded.

    Args:
      model_id: Hugging Face id.
      revision: Branch, tag or commit. "" is the main branch.
      has_weights: Whether to download the safetensors files.

    Raises:
      ConfigError: The hub has no such model or revision, denies the download, or cannot be reached.
      UnsupportedModelError: meshserve does not support the model, or it has no safetensors files.
    """
    directory = _download(model_id, revision, _SMALL_PATTERNS)
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(f"--model {model_id}: it has no config.json, so it is not a transformers model.")
    read_model(directory / "config.json")
    if (directory / "modules.json").is_file():  # an embedding model
        _download(model_id, directory.name, (_POOLING_PATTERN,), ignored=())
    if has_weights:
        if not any(directory.glob(_WEIGHT_PATTERN)):
            _log.info("downloading the weights of %s to %s", model_id, directory)
        # The directory is named after its commit, so the weights come from the same commit even if the branch moves.
        directory = _download(model_id, directory.name, (*_SMALL_PATTERNS, _WEIGHT_PATTERN))
        if not any(directory.glob(_WEIGHT_PATTERN)):
            raise UnsupportedModelError(
                f"--model {model_id}: {directory} has no safetensors files. If the model has none on the hub, choose "
                "another model; if HF_HUB_OFFLINE is set, unset it to download them."
            )
    _log.info("%s is at %s", model_id, directory)
    return directory


def download_adapter(adapter_id: str, *, has_weights: bool) -> Path:
    """Downloads the files of an adapter (LoRA) that are not cached yet and returns their directory.

    Raises:
      ConfigError: The hub has no such repository, denies the download, or cannot be reached, or it has no adapter.
    """
    wanted = _ADAPTER_PATTERNS[: 1 + has_weights]
    directory = _download(adapter_id, "", wanted, option="--adapter")
    for name in wanted:
        if not (directory / name).is_file():
            raise ConfigError(
                f"--adapter {adapter_id}: {directory} has no {name}. If there is none on the hub, it is no adapter as "
                "PEFT saves it; if HF_HUB_OFFLINE is set, unset it to download it."
            )
    _log.info("the adapter %s is at %s", adapter_id, directory)
    return directory


def _download(
    model_id: str,
    revision: str,
    patterns: tuple[str, ...],
    ignored: tuple[str, ...] = (_SUBFOLDERS,),
    *,
    option: str = "--model",
) -> Path:
    """Updates the cache with the files that match the patterns and returns the snapshot directory.

    Raises:
      ConfigError: See `download_model`.
    """
    import huggingface_hub  # not at module level: local models do not need it
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"{option} {model_id}" + (f" at revision {revision}" if revision else "")
    if constants.HF_HUB_CACHE.startswith("~"):
        raise ConfigError(f"{what}: this user has no home directory to download it to. {_SET_HOME}")
    try:
        directory = huggingface_hub.snapshot_download(
            model_id, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=list(ignored)
        )
    except GatedRepoError:
        reason = (
            f"its authors grant access on request. Ask for it at {_page(model_id)}, and run `hf auth login` or set "
            "HF_TOKEN."
        )
    except RepositoryNotFoundError:
        reason = (
            "there is no such local directory, and no such model on the Hugging Face hub. Check the spelling; if the "
            "model is private, run `hf auth login` or set HF_TOKEN."
        )
    except RevisionNotFoundError:
        reason = f"the model has no such branch, tag or commit. {_page(model_id)}/commits/main lists them."
    except HFValidationError as error:
        reason = f"this is neither a local directory nor a valid model id: {error}"
    except LocalEntryNotFoundError as error:
        reason = _not_cached(error)
    except PermissionError as error:
        reason = f"the cache {constants.HF_HUB_CACHE} cannot be written to ({error}). {_SET_HOME}"
    except Exception as error:  # from the HTTP library, whose type depends on the release, or from the disk
        if getattr(getattr(error, "response", None), "status_code", None) == http.HTTPStatus.UNAUTHORIZED:
            reason = "the hub refused the token of HF_TOKEN or `hf auth login`. Correct it, or remove it."
        else:
            reason = f"the download failed ({type(error).__name__}: {error}). Repeat the command to continue."
    else:
        return Path(directory)
    raise ConfigError(f"{what}: {reason}")


def _not_cached(error: Exception) -> str:
    """Returns why files that are not cached could not be downloaded, and what to do."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not contain all of its files. Unset "
            "HF_HUB_OFFLINE, or copy the cache from a machine that has downloaded the model."
        )
    return (
        f"it is not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be reached "
        f"({type(error.__cause__ or error).__name__}). Check the network, or download the model on another machine and "
        "pass its directory."
    )


def _page(model_id: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{model_id}"
