"""Renders conversations with a model's chat template. Part of step 2 of 10. In: messages. Out: the text of a prompt."""

import contextlib
import functools
import logging
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api.errors import InvalidRequestError, UnsupportedModelError
from .known_template import KnownTemplate
from .known_text_files import is_known_template
from .limited_text import LimitedText
from .template_renderer import has_template, template_files, template_text

Messages = Sequence[Mapping[str, Any]]

_USUAL_ROLES = ("system", "user", "assistant", "tool")
_MAX_KNOWN_ROLES = 256  # whose answers are kept
_NO_ROLE = "a role that no template has"
_CONTENT = "meshserve"
_log = logging.getLogger(__name__)


class ChatTemplate:
    """The chat template of a model directory. Thread-safe.

    One that is known runs in this process, any other in processes of limited time and memory.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._lock = threading.RLock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._text: str | None = None
        self._exists = self._is_known = False  # whether there is one, and whether it is known
        self._loaded: KnownTemplate | None = None
        self._limited: LimitedText | None = None
        self._has_role = functools.lru_cache(_MAX_KNOWN_ROLES)(self._find_role)

    @property
    def text(self) -> str:
        """The template itself; empty if there is none, or several."""
        self._open()
        return self._text or ""

    @property
    def limited(self) -> LimitedText:
        """The processes in which it runs if it is not known, and the tokenizer if that is not known."""
        with self._lock:
            if self._limited is None:
                self._limited = LimitedText(self._directory / "tokenizer.json", str(self._open()))
            return self._limited

    def render(self, messages: Messages, **options: Any) -> str:
        """Renders the prompt of a conversation; see `Tokenizer.render_chat`."""
        self._open()
        if not self._exists:
            raise UnsupportedModelError(
                f"{self._directory} has no chat template. Add chat_template.jinja, or send the prompt as plain text."
            )
        self._check_roles(messages)
        return self._render(messages, **options)

    def check(self) -> None:
        """Runs the template once if it is not known. Does nothing if there is none.

        Raises:
          UnsupportedModelError: It exceeds a limit, or a file of it cannot be read.
        """
        self._open()
        if self._exists and not self._is_known:
            with contextlib.suppress(InvalidRequestError):  # it may need more than one message
                self._render([{"role": "user", "content": ""}])

    def _check_roles(self, messages: Messages) -> None:
        """Checks that the template writes messages of each role. Templates drop those of roles that they do not have.

        Raises:
          InvalidRequestError: It does not write those of one.
        """
        if self._has_role(_NO_ROLE):
            return
        for index, message in enumerate(messages):
            role = message.get("role")
            if isinstance(role, str) and not self._has_role(role):
                known = ", ".join(filter(self._has_role, _USUAL_ROLES))
                raise InvalidRequestError(
                    f"messages[{index}].role", f"got {role!r}, whose messages the chat template drops. It has {known}."
                )

    def _find_role(self, role: str) -> bool:
        """Returns whether the content of a message with a role is in the prompt, wherever the message stands.

        A role that the template refuses with an error of its own counts as one that it has.
        """
        message, others = {"role": role, "content": _CONTENT}, [{"role": "user", "content": "a"}]
        answered = [*others, {"role": "assistant", "content": "b"}]
        is_dropped = False
        for messages in ([message], [message, *others], [*others, message], [*answered, message]):
            try:
                if _CONTENT in self._render(messages, add_generation_prompt=False):
                    return True
                is_dropped = True
            except InvalidRequestError as error:
                _log.debug("the chat template refuses a message of role %r: %s", role, error)
        return not is_dropped

    def _render(self, messages: Messages, **options: Any) -> str:
        if not self._is_known:
            return self.limited.render(f"the chat template of {self._directory}", messages, options)
        try:
            return self._renderer().render(messages, **options)
        except Exception as error:  # jinja2 errors, and any error of a template on unexpected messages
            raise InvalidRequestError("messages", f"the chat template refused them: {error}") from error

    def _open(self) -> Path:
        """Returns the folder with the template's files, made on first use."""
        with self._lock:
            if self._folder is None:
                folder = template_files(self._directory)
                self._text = template_text(Path(folder.name))
                self._exists = has_template(Path(folder.name))
                self._is_known = self._text is not None and is_known_template(self._text)
                self._folder = folder
            return Path(self._folder.name)

    def _renderer(self) -> KnownTemplate:
        with self._lock:
            if self._loaded is None:
                self._loaded = KnownTemplate(self.text)
            return self._loaded
