"""Decides what a model is for: generating text, embedding texts, or reranking documents.

The files of an embedding model say so, in the format of sentence-transformers: modules.json lists a Pooling module,
whose own config.json says how it pools. A reranker in its published form has the files of a model that generates text,
so `--task rerank` must name it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshserve.sharding.guarded_files import contained

from ..api.errors import UnsupportedModelError
from ..api.tasks import EMBED, GENERATE, RERANK
from ..model_files.model_config import ModelConfig, Pooling, read_json, read_json_if_present, read_json_list
from ..model_files.number_bounds import shown
from ..text.tokenizer import open_tokenizer

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
_SCORED_TOKENS = ("no", "yes")
_POOLING_FOLDER = "1_Pooling"
_LAST_TOKEN_FLAG = "pooling_mode_lasttoken"
_MAX_SHOWN_CHARS = 200
_HARMLESS_MODULES = ("Transformer", "Pooling", "Normalize")


def with_task(model: ModelConfig, task: str, directory: Path) -> ModelConfig:
    """Returns the config of a model for a task, which is an option of the server or "auto".

    Args:
      model: The model, as it would generate tokens.
      task: See `ServeConfig.task`.
      directory: Contains the small files of the model.

    Raises:
      UnsupportedModelError: The model cannot do the task, or its files name a pooling that is not implemented.
    """
    found = published_task(directory) if task in ("auto", EMBED) else task
    task = found if task == "auto" else task
    if task == GENERATE:
        return model
    if task == EMBED:
        # The head is not used, and Qwen3-Embedding-8B has none, although its config.json says that it is not tied.
        return dataclasses.replace(model, pooling=Pooling(score_token_ids=None), is_tied=True, head_quantization=None)
    if model.head_quantization is not None:
        raise UnsupportedModelError(
            "--fp8-head: a reranker compares two tokens of its output head, which must not be quantized. Omit it."
        )
    return dataclasses.replace(model, pooling=Pooling(score_token_ids=_score_token_ids(directory, model.vocab_size)))


def published_task(directory: Path) -> str:
    """Returns the task that the files of a model directory name; GENERATE if they name none.

    Raises:
      UnsupportedModelError: They name a pooling that is not implemented, or a file is unreadable.
    """
    settings = read_json_if_present(directory / SETTINGS_FILE)
    if settings.get("model_type") == "CrossEncoder":
        return RERANK
    kinds = published_modules(directory)
    unknown = sorted(kinds.keys() - set(_HARMLESS_MODULES))
    if unknown:
        raise UnsupportedModelError(
            f"{directory / MODULES_FILE} lists {', '.join(unknown)[:_MAX_SHOWN_CHARS]}; meshserve implements "
            f"{', '.join(_HARMLESS_MODULES)}. Serve the model with --task generate if you do not need its embeddings."
        )
    if "Pooling" not in kinds:
        return GENERATE
    try:
        folder = contained(directory, kinds["Pooling"].get("path") or _POOLING_FOLDER)
    except OSError as error:
        raise UnsupportedModelError(f"{directory / MODULES_FILE}: {error.filename} is not read: {error}.") from None
    _check_pooling(folder / "config.json")
    return EMBED


def published_modules(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """Returns the modules of sentence-transformers that a model's files list, by the names of their classes.

    Raises:
      UnsupportedModelError: The file is unreadable.
    """
    if not (directory / MODULES_FILE).is_file():
        return {}
    modules = read_json_list(directory / MODULES_FILE)
    return {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}


def _check_pooling(path: Path) -> None:
    """
    Raises:
      UnsupportedModelError: The module pools something other than the last token, or its file is missing.
    """
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{path} does not exist, but {MODULES_FILE} names it. Copy it beside the other files of the model."
        ) from None
    modes = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    mode = raw.get("pooling_mode", ", ".join(modes))  # newer releases write one name
    if mode not in ("lasttoken", _LAST_TOKEN_FLAG):
        raise UnsupportedModelError(
            f"{path}: the pooling is {shown(mode or 'not given')}; meshserve implements the last token's only "
            f"({_LAST_TOKEN_FLAG})."
        )


def _score_token_ids(directory: Path, vocab_size: int) -> tuple[int, int]:
    tokenizer = open_tokenizer(directory)
    found = [tokenizer.token_id(token) for token in _SCORED_TOKENS]
    missing = [
        repr(token)
        for token, token_id in zip(_SCORED_TOKENS, found, strict=True)
        if token_id is None or token_id >= vocab_size
    ]
    if missing:
        raise UnsupportedModelError(
            f"--task rerank: the vocabulary of {directory} has no token {' and '.join(missing)}, whose logits a "
            "reranker compares. Serve a model such as Qwen3-Reranker-0.6B, or omit --task."
        )
    no, yes = found
    assert no is not None and yes is not None
    return no, yes
