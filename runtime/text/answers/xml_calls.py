"""Reads a tool call that is written as tags, as Qwen3-Coder models do.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Berlin
    </parameter>
    </function>
    </tool_call>

The arguments become JSON. A value is text if the tool's schema says so or does not know the parameter; otherwise it is
JSON if it can be read as such. Text values are passed on as they come, others once they are complete.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from .answer_parts import held_back

CLOSE = "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(?:\n|(?=[^\n]))")
_END_OF_FUNCTION = re.compile(r"\s*</function>\s*")
_END_OF_VALUE = "\n</parameter>", "</parameter>"
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class XmlCall:
    """One call. See `CallReader`.

    Args:
      parameters: By the name of a function, the JSON schema of its parameters.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]):
        self.name: str | None = None
        self.is_ended = self.is_malformed = False
        self.rest = ""
        self._parameters = parameters
        self._text = ""  # not read yet
        self._key: str | None = None  # of the parameter whose value is being read
        self._is_text = False  # the value is
        self._num_values = 0
        self._has_arguments = False

    def push(self, text: str) -> str:
        self._text += text
        pieces: list[str] = []
        while not (self.is_ended or self.is_malformed):
            piece = self._step()
            if piece is None:
                break
            pieces.append(piece)
        return "".join(pieces)

    def _step(self) -> str | None:
        """Reads on, and returns more of the arguments; None if more text is needed."""
        if self.name is None:
            return self._begin()
        if self._has_arguments:
            before, is_closed, rest = self._text.partition(CLOSE)
            if is_closed:
                self.is_ended, self.rest = True, rest
            return "" if is_closed else None
        if self._key is not None:
            return self._value()
        if match := _PARAMETER.match(self._text):
            return self._begin_value(match)
        if match := _END_OF_FUNCTION.match(self._text):
            self._text, self._has_arguments = self._text[match.end() :], True
            return "}" if self._num_values else "{}"
        if CLOSE in self._text:  # the tag of the function was left open
            self._text, self._has_arguments = self._text[self._text.index(CLOSE) :], True
            return "}" if self._num_values else "{}"
        return None

    def _begin(self) -> str | None:
        if match := _FUNCTION.match(self._text):
            self.name, self._text = match[1].strip(), self._text[match.end() :]
            return ""
        self.is_malformed = CLOSE in self._text
        return None

    def _begin_value(self, match: re.Match[str]) -> str:
        self._key, self._text = match[1].strip(), self._text[match.end() :]
        self._is_text = self._type_of(self._key) in (None, "string")
        begin = "{" if not self._num_values else ", "
        self._num_values += 1
        return f"{begin}{json.dumps(self._key, ensure_ascii=False)}: " + ('"' if self._is_text else "")

    def _value(self) -> str | None:
        """Reads on in a value."""
        ends = [self._text.index(end) for end in _END_OF_VALUE if end in self._text]
        if not ends:
            size = len(self._text) - held_back(self._text, *_END_OF_VALUE)
            if not self._is_text or not size:
                return None
            piece, self._text = self._text[:size], self._text[size:]
            return _escaped(piece)
        value, rest = self._text[: min(ends)], self._text[min(ends) :]
        self._key, self._text = None, rest.partition("</parameter>")[2]
        return f'{_escaped(value)}"' if self._is_text else _json_of(value)

    def _type_of(self, key: str) -> Any:
        """Returns the type of a parameter in the schema of its function; None if the schema does not say one type."""
        schema = self._parameters.get(self.name or "", {}).get("properties", {})
        of_key = schema.get(key) if isinstance(schema, Mapping) else None
        if not isinstance(of_key, Mapping):
            return None
        return of_key.get("type", "string" if "enum" not in of_key and "anyOf" not in of_key else "any")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(value: str) -> str:
    """Returns a value as JSON: itself if it is some, or else the text."""
    stripped = value.strip()
    if stripped in _PYTHON_WORDS:
        return json.dumps(_PYTHON_WORDS[stripped])
    try:
        return json.dumps(json.loads(stripped), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
