"""Renders conversations by transformers, with nothing of a model but its chat template and the names of its tokens."""

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshserve.sharding.guarded_files import contained, read_guarded

from ..api.errors import UnsupportedModelError
from .known_text_files import without_tokens

_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_MAX_FILE_BYTES = 16 << 20
_NAMED_TEMPLATES = "additional_chat_templates"
_MAX_NAMED_TEMPLATES = 64
_transformers_log = logging.getLogger("transformers")


def import_transformers() -> Any:
    """Returns transformers' class for tokenizers. Importing it takes a second or two."""
    _transformers_log.addFilter(_drop)  # drops its warning that torch is missing
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        _transformers_log.removeFilter(_drop)
    return PreTrainedTokenizerFast


class Renderer:
    """The chat template of a folder made by `template_files`."""

    def __init__(self, folder: str):
        self._tokenizer = import_transformers().from_pretrained(folder)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last_message: bool = False,
        **template_options: Any,
    ) -> str:
        """Renders the prompt of a conversation; see `Tokenizer.render_chat`. Raises whatever the template raises."""
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_last_message,
            **template_options,
        )
        return str(rendered)


def template_files(directory: Path) -> "tempfile.TemporaryDirectory[str]":
    """Copies what a template needs of a model directory, beside a tokenizer.json without tokens.

    Raises:
      UnsupportedModelError: A file cannot be read.
    """
    folder = tempfile.TemporaryDirectory(prefix="meshserve-template-")
    target = Path(folder.name)
    (target / "tokenizer.json").write_text(json.dumps(without_tokens()))
    named = sorted((directory / _NAMED_TEMPLATES).glob("*.jinja"))[:_MAX_NAMED_TEMPLATES]
    for name in (*_FILES, *(f"{_NAMED_TEMPLATES}/{path.name}" for path in named)):
        try:
            data = read_guarded(contained(directory, name), _MAX_FILE_BYTES).data
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UnsupportedModelError(f"{directory / name} cannot be read: {error}.") from None
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)
    return folder


def template_text(folder: Path) -> str | None:
    """Returns the chat template of a folder made by `template_files`; None if it has several, or none.

    Raises:
      UnsupportedModelError: A file is no text.
    """
    try:
        if (folder / _NAMED_TEMPLATES).is_dir():
            return None
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text("utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"the files of the chat template cannot be read: {error}.") from None
    text = config.get("chat_template") if isinstance(config, dict) else None
    return text if isinstance(text, str) else None


def has_template(folder: Path) -> bool:
    """Returns whether a folder made by `template_files` has a chat template, or several."""
    if template_text(folder) or (folder / _NAMED_TEMPLATES).is_dir():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text("utf-8")).get("chat_template"))


def _drop(record: logging.LogRecord) -> bool:
    """Log filter that drops every record."""
    return False
