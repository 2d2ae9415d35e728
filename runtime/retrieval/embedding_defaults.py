"""Reads what an embedding model's files say about requests that leave it open, as sentence-transformers reads them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..api.errors import UnsupportedModelError
from ..model_files.model_config import read_json_if_present
from ..model_files.number_bounds import check_number, shown
from ..weights.model_task import SETTINGS_FILE, published_modules
from .results import EmbeddingForm

_TRANSFORMER_FILE = "sentence_bert_config.json"  # of the module Transformer
_USUAL_PROMPTS = {"query": "", "document": ""}  # of sentence-transformers, if the files have none
_MAX_SHOWN_CHARS = 500  # of the names of prompts, in an error
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EmbeddingDefaults:
    """How texts are embedded unless a request says otherwise."""

    prompt: str = ""  # before each text without an instruction
    dimensions: int | None = None  # None: all of the model's
    is_normalized: bool = True

    def form(
        self, model_dimensions: int, dimensions: int | None = None, is_normalized: bool | None = None
    ) -> EmbeddingForm:
        """Returns the form of a request's embeddings. None: the request leaves it open.

        Raises:
          InvalidRequestError: See `EmbeddingForm`.
        """
        is_open = dimensions is None and is_normalized is None
        return EmbeddingForm(
            model_dimensions=model_dimensions,
            dimensions=dimensions
            if dimensions is not None
            else min(self.dimensions or model_dimensions, model_dimensions),
            is_normalized=self.is_normalized if is_normalized is None else is_normalized,
            is_cut_last=is_open and self.dimensions is not None,
        )


def read_embedding_defaults(directory: Path) -> EmbeddingDefaults:
    """Returns the defaults of an embedding model, and logs them and what is not as with sentence-transformers.

    Args:
      directory: Contains the small files of the model.

    Raises:
      UnsupportedModelError: A file is unreadable, or a value in it is not allowed.
    """
    settings, modules = read_json_if_present(directory / SETTINGS_FILE), published_modules(directory)
    defaults = EmbeddingDefaults(
        prompt=_default_prompt(directory / SETTINGS_FILE, settings),
        dimensions=_dimensions(directory / SETTINGS_FILE, settings),
        is_normalized=not modules or "Normalize" in modules,
    )
    if defaults != EmbeddingDefaults():
        _log.info(
            "embeddings unless a request says otherwise: prompt %r (default_prompt_name), %s dimensions "
            "(truncate_dim), %snormalized (modules.json)",
            defaults.prompt, defaults.dimensions or "all", "" if defaults.is_normalized else "not ",
        )  # fmt: skip
    transformer = read_json_if_present(directory / _TRANSFORMER_FILE)
    if transformer.get("max_seq_length"):
        _log.warning(
            "sentence-transformers cuts texts to %s tokens (max_seq_length of %s); here texts of up to max_context "
            "tokens are embedded as a whole. Shorten them for the same embeddings.",
            shown(transformer["max_seq_length"]), _TRANSFORMER_FILE,
        )  # fmt: skip
    if transformer.get("do_lower_case"):
        _log.warning(
            "sentence-transformers changes texts to lower case (do_lower_case of %s); here they are embedded as they "
            "are. Send them in lower case for the same embeddings.",
            _TRANSFORMER_FILE,
        )
    return defaults


def _default_prompt(path: Path, settings: Mapping[str, Any]) -> str:
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is None:
        return ""
    known = {**_USUAL_PROMPTS, **prompts} if isinstance(prompts, dict) else _USUAL_PROMPTS
    prompt = known.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or name not in known or not isinstance(prompt or "", str):
        raise UnsupportedModelError(
            f"{path}: default_prompt_name is {shown(name)}; allowed are the names of texts in prompts: "
            f"{', '.join(known)[:_MAX_SHOWN_CHARS]}."
        )
    return prompt or ""


def _dimensions(path: Path, settings: Mapping[str, Any]) -> int | None:
    if settings.get("truncate_dim") is None:
        return None
    check_number(settings, "truncate_dim", str(path))
    return int(settings["truncate_dim"])
