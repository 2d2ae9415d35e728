"""Renders conversations with a chat template that is known, by jinja2 alone.

Importing transformers takes about a second of every start, and of a template it uses jinja2. For a template that has
been read by a person (`known_text_files`) this does the same: the sandbox with the same filters and functions, and what
transformers does to messages before and to the text after. Tests compare both. Any other template is transformers'.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # as callers name it; templates read the first
_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class KnownTemplate:
    """A chat template that is known.

    Args:
      text: The template.

    Raises:
      jinja2.TemplateError: It is no template.
    """

    def __init__(self, text: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._text = text
        self._template = environment.from_string(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last_message: bool = False,
        **template_options: Any,
    ) -> str:
        """Renders the prompt of a conversation; see `Tokenizer.render_chat`. Raises whatever the template raises."""
        if not messages:
            raise ValueError("Provide at least one message.")
        if continue_last_message and add_generation_prompt:
            raise ValueError("the last message cannot be continued and followed by another.")
        chat = [_as_templates_read(message) for message in messages]
        continued = _tag_end(chat[-1]) if continue_last_message else ""
        options = {"tools": None, "documents": None, **template_options}
        rendered = self._template.render(messages=chat, add_generation_prompt=add_generation_prompt, **options)
        return _until_tag(rendered, continued) if continue_last_message else rendered


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a message without keys that are None, and with its reasoning under the names templates read."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING_NAMES if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _tag_end(message: dict[str, Any]) -> str:
    """Marks the end of a message's text, and returns the text.

    Raises:
      ValueError: It has none.
    """
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_TAG
        return content
    blocks = list(content) if isinstance(content, list | tuple) else []
    for index in reversed(range(len(blocks))):
        if "text" in blocks[index]:
            text = blocks[index]["text"]
            blocks[index] = {**blocks[index], "text": text + _END_TAG}
            message["content"] = blocks
            return text
    raise ValueError("the last message has no text to continue.")


def _until_tag(rendered: str, continued: str) -> str:
    """Returns what lies before the mark, without trailing space if the template has trimmed that of the message.

    Raises:
      ValueError: The template has dropped the message, or a part of it.
    """
    tag = _END_TAG.strip()
    if continued.strip() not in rendered or tag not in rendered:
        raise ValueError("the chat template drops parts of the last message, so it cannot be continued.")
    place = rendered.rindex(tag)
    is_spaced = rendered[place : place + len(_END_TAG)] == _END_TAG
    return rendered[:place] if is_spaced else rendered[:place].rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter escapes what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
