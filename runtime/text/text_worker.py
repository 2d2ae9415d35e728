"""The processes in which tokenizers and chat templates run that are not known to end; see `known_text_files`.

Whatever they do, they do it here: also the parsing of a tokenizer.json, whose regular expressions are compiled then,
and the compilation of a template, which computes its constants.
"""

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from .template_renderer import Renderer, import_transformers
from .worker_protocol import PROGRESS
from .worker_template import run_template

_MAX_CHARS = 8 << 20  # of a prompt; no context holds as many
_MAX_TOKENS = 4 << 20
_MAX_ERROR_CHARS = 1_000


class TextWorker:
    """Renders and encodes.

    A message names the files and has `"render": [messages, options]` or `"encode": [text, is_completed]`. The answer
    has the `result`, the `error` of the template or tokenizer, or the `limit` that it exceeded.
    """

    def __init__(self, loaded: None, settings: dict[str, Any], memory: mmap.mmap):
        self._memory = memory
        self._renderer: Renderer | None = None
        self._tokenizer: tokenizers.Tokenizer | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does what a message asks for."""
        PROGRESS.pack_into(self._memory, 0, 1, os.getpid(), int(time.process_time() * 1e9))
        try:
            if "render" in message:
                return self._render(message["template_folder"], *message["render"])
            return self._encode(message["tokenizer_file"], *message["encode"])
        except MemoryError:
            os.abort()  # as native code does, so that the server knows what the cause is
        except BaseException as error:  # of the template on unexpected messages, or a panic of native code
            return {"error": str(error)[:_MAX_ERROR_CHARS] or type(error).__name__}

    def _render(self, folder: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        if self._renderer is None:
            self._renderer = Renderer(folder)
        text = self._renderer.render(messages, **options)
        if len(text) > _MAX_CHARS:
            return {"limit": f"made {len(text)} characters; allowed are {_MAX_CHARS}"}
        return {"result": text}

    def _encode(self, file: str, text: str, is_completed: bool) -> dict[str, Any]:
        if self._tokenizer is None:
            self._tokenizer = tokenizers.Tokenizer.from_file(file)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        token_ids = self._tokenizer.encode(text, add_special_tokens=is_completed).ids
        if len(token_ids) > _MAX_TOKENS:
            return {"limit": f"made {len(token_ids)} tokens; allowed are {_MAX_TOKENS}"}
        return {"result": token_ids}


def _load(settings: Mapping[str, Any]) -> None:
    import_transformers()  # once for all workers


def main(arguments: Sequence[str]) -> None:
    """Runs the template of these processes; see `run_template`."""
    run_template(arguments, _load, TextWorker)
