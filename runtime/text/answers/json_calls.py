"""Reads a tool call that is written as JSON: `{"name": "f", "arguments": {"x": 1}}`, then `</tool_call>`.

Qwen3 and Qwen2.5 models write calls in this way (the Hermes format). The arguments are passed on as they come, in the
model's own words, if the name stands before them; otherwise once the call is complete.
"""

import json
import re

CLOSE = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


class JsonCall:
    """One call. See `CallReader`."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_ended = self.is_malformed = False
        self.rest = ""
        self._text = ""  # before the name is known: everything; then what may be part of the closing tag
        self._depth = 0  # of the braces and brackets in the arguments
        self._in_string = self._is_escaped = self._has_arguments = False

    def push(self, text: str) -> str:
        self._text += text
        return self._head() if self.name is None else self._body()

    def _head(self) -> str:
        if match := _HEAD.match(self._text):
            self.name = json.loads(match[1], strict=False)
            self._text = self._text[match.end() :]
            return self._body()
        whole, is_closed, rest = self._text.partition(CLOSE)
        if not is_closed:
            return ""
        try:
            call = json.loads(whole, strict=False)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.is_malformed = True
            return ""
        self.name, self.rest, self.is_ended = name, rest, True
        return json.dumps(arguments, ensure_ascii=False)

    def _body(self) -> str:
        if not self._has_arguments:
            end = self._end_of_arguments()
            arguments, self._text = self._text[:end], self._text[end:]
            if not self._has_arguments:
                return arguments
        else:
            arguments = ""
        before, is_closed, rest = self._text.partition(CLOSE)
        if is_closed:
            self.is_ended, self.rest = True, rest
        return arguments

    def _end_of_arguments(self) -> int:
        """Returns how many characters of the text belong to the arguments."""
        for index, letter in enumerate(self._text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._has_arguments = True
                    return index + 1
        return len(self._text)
