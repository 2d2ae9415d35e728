"""Downloads a model that `--model` names by its Hugging Face id, as in Qwen/Qwen3-8B.

`huggingface_hub` does the work, by its own conventions: the progress bar, the cache (HF_HOME), the token (HF_TOKEN or
`hf auth login`), another endpoint (HF_ENDPOINT) and the offline switch (HF_HUB_OFFLINE=1).
"""

import logging
import re
from pathlib import Path

from ..api.errors import ConfigError, UnsupportedModelError
from .registry import read_model

_log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_SMALL_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
_WEIGHT_PATTERN = "*.safetensors"
_SUBFOLDERS = "*/*"  # other forms of the same model, as onnx/model.onnx


def is_hub_id(model: str) -> bool:
    """Whether a name has the form of a model id of the hub, organization/name. A local directory may have it too."""
    return _ID.fullmatch(model) is not None


def download_model(model_id: str, *, revision: str, has_weights: bool) -> Path:
    """Downloads what a model directory needs and is not in the cache yet, and returns that directory.

    config.json comes first, so that a model that cannot be served is refused before its weights are downloaded.

    Args:
      revision: a branch, tag or commit; "" is the main branch.
      has_weights: False leaves the safetensors files out.

    Raises:
      ConfigError: the hub has no such model or revision, does not permit the download, or cannot be reached.
      UnsupportedModelError: it is a model that meshserve does not serve, or it has no safetensors files.
    """
    directory = _download(model_id, revision, _SMALL_PATTERNS)
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(f"--model {model_id}: it has no config.json, so it is not a model of transformers.")
    read_model(directory / "config.json")
    if has_weights:
        # The directory is named by its commit: the weights come from the same one, even if the branch moves.
        directory = _download(model_id, directory.name, (*_SMALL_PATTERNS, _WEIGHT_PATTERN))
        if not any(directory.glob(_WEIGHT_PATTERN)):
            raise UnsupportedModelError(
                f"--model {model_id}: {directory} holds no safetensors files. If the model has none on the hub, name "
                "another one; if HF_HUB_OFFLINE is set, unset it, so that they are downloaded."
            )
    _log.info("%s is at %s", model_id, directory)
    return directory


def _download(model_id: str, revision: str, patterns: tuple[str, ...]) -> Path:
    """Brings the cache up to date with the files of the patterns, and returns the snapshot's directory.

    Raises:
      ConfigError: as `download_model`.
    """
    import huggingface_hub  # here, because local models are served without it
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"--model {model_id}" + (f" at revision {revision}" if revision else "")
    try:
        directory = huggingface_hub.snapshot_download(
            model_id, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=[_SUBFOLDERS]
        )
    except GatedRepoError:
        reason = (
            f"its authors grant access on request. Ask for it at {_page(model_id)}, then run `hf auth login` or set "
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
    except Exception as error:  # of the HTTP library, which depends on the release, or of the cache's disk
        reason = f"the download failed ({type(error).__name__}: {error}). The same command continues it."
    else:
        return Path(directory)
    raise ConfigError(f"{what}: {reason}")


def _not_cached(error: Exception) -> str:
    """Why files that are not in the cache could not be downloaded either, and what to do."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold all of its files. Unset "
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
