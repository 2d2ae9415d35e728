"""Parses JSON of callers: strictly, in bounded memory, in pieces that hold Python's lock for a moment only. Writes it.

The standard library takes what no other program takes for JSON: NaN, infinity, halves of characters, numbers of any
length. It builds whatever it is sent, up to 50 times the size of the text, and no other thread runs meanwhile.
"""

import json
import math
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from ..api.errors import InvalidRequestError

MAX_NUMBERS = 2**22  # in lists
MAX_DEPTH = 128
_MAX_DIGITS = 20  # of a whole number
_MAX_FLOAT_CHARS = 400
_PIECE_ITEMS = 8_192
_PIECE_CHARS = 32_768  # of numbers: they take less than a millisecond
_FEW_CONTAINERS = 1_000  # less than a millisecond

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]{1,400}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character, and perhaps without its other half

_CONTAINERS = (dict, list, tuple)

_CONSTANTS = {"true": True, "false": False, "null": None}


def parsed(data: bytes) -> Any:
    """Returns the value of a short text at once.

    Raises:
      InvalidRequestError: It is not JSON, or too deep.
    """
    try:
        value = _decoder.decode(data.decode("utf-8-sig"))
        if _HALF.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        if _num_containers(data) > MAX_DEPTH:
            _check_depth(value, MAX_DEPTH)
    except (ValueError, RecursionError) as error:
        raise _invalid(error) from None
    return value


def takes_long(data: bytes, many: int) -> bool:
    """Returns whether parsing a text takes longer than some milliseconds, as one of `many` bytes may."""
    return len(data) > many or _num_containers(data) > _FEW_CONTAINERS


def parsed_in_pieces(data: bytes, max_values: int) -> Any:
    """Returns the value of a text that may be long. Other threads run meanwhile.

    Args:
      data: The text.
      max_values: How many values it may have, besides the numbers in lists.

    Raises:
      InvalidRequestError: It is not JSON, or has too many values or levels.
    """
    try:
        return _Pieces(data.decode("utf-8-sig"), max_values).parsed()
    except (ValueError, RecursionError) as error:
        raise _invalid(error) from None


def in_pieces(value: Any) -> str:
    """Returns a value as JSON, as `json.dumps` does. Other threads run meanwhile."""
    if isinstance(value, dict) and any(isinstance(each, _CONTAINERS) for each in value.values()):
        return "{" + ", ".join(f"{json.dumps(name)}: {in_pieces(each)}" for name, each in value.items()) + "}"
    if not isinstance(value, list | tuple):
        return json.dumps(value)
    if any(isinstance(each, _CONTAINERS) for each in value):
        return "[" + ", ".join(map(in_pieces, value)) + "]"
    pieces = (value[start : start + _PIECE_ITEMS] for start in range(0, len(value), _PIECE_ITEMS))
    return "[" + ", ".join(json.dumps(piece)[1:-1] for piece in pieces) + "]"


class _Pieces:
    """One text that is parsed in pieces. All methods raise ValueError, and return where the next value begins."""

    def __init__(self, text: str, max_values: int):
        self._text, self._max_values = text, max_values
        self._num_numbers = self._num_values = 0

    def parsed(self) -> Any:
        value, end = self._value(self._after_space(0), 0)
        if (end := self._after_space(end)) != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return value

    def _after_space(self, index: int) -> int:
        found = _SPACE.match(self._text, index)
        assert found is not None
        return found.end()

    def _value(self, index: int, depth: int) -> tuple[Any, int]:
        """Returns the value that begins at `index`."""
        self._num_values += 1
        if self._num_values > self._max_values:
            raise ValueError(f"more than {self._max_values} values; no request needs so many")
        first = self._text[index : index + 1]
        if first == '"':
            return self._string(index)
        if first in ("[", "{") and first:
            if depth == MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} levels")
            return self._list(index + 1, depth + 1) if first == "[" else self._object(index + 1, depth + 1)
        found = _SCALAR.match(self._text, index)
        if found is None:
            raise json.JSONDecodeError("Expecting value", self._text, index)
        text = found[0]
        return _CONSTANTS[text] if text in _CONSTANTS else _decoder.decode(text), found.end()

    def _string(self, index: int) -> tuple[str, int]:
        text, end = scanstring(self._text, index + 1, True)
        if not text.isascii():
            text.encode()  # or it has half a character
        return text, end

    def _list(self, index: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        index = self._after_space(index)
        if self._text.startswith("]", index):
            return values, index + 1
        while True:
            index = self._numbers(index, values)
            value, index = self._value(self._after_space(index), depth)
            values.append(value)
            index = self._after_space(index)
            if not self._text.startswith(",", index):
                return values, self._closed("]", index)
            index += 1

    def _numbers(self, index: int, values: list[Any]) -> int:
        """Adds the numbers that follow, but for the last one."""
        while True:
            found = _NUMBERS.match(self._text, index, index + _PIECE_CHARS)
            end = self._text.rfind(",", index, found.end()) if found is not None else -1
            if end <= index:
                return index
            numbers = _decoder.decode(f"[{self._text[index:end]}]")
            if not numbers:
                raise json.JSONDecodeError("Expecting value", self._text, index)
            self._num_numbers += len(numbers)
            if self._num_numbers > MAX_NUMBERS:
                raise ValueError(f"more than {MAX_NUMBERS} numbers; no request needs so many")
            values += numbers
            index = end + 1

    def _object(self, index: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        index = self._after_space(index)
        if self._text.startswith("}", index):
            return values, index + 1
        while True:
            if not self._text.startswith('"', index):
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, index)
            name, index = self._string(index)
            index = self._closed(":", self._after_space(index))
            values[name], index = self._value(self._after_space(index), depth)
            index = self._after_space(index)
            if not self._text.startswith(",", index):
                return values, self._closed("}", index)
            index = self._after_space(index + 1)

    def _closed(self, expected: str, index: int) -> int:
        if not self._text.startswith(expected, index):
            raise json.JSONDecodeError(f"Expecting '{expected}' delimiter", self._text, index)
        return index + 1


def _num_containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _check_depth(value: Any, most: int) -> None:
    if not isinstance(value, list | dict):
        return
    if not most:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    for each in value.values() if isinstance(value, dict) else value:
        _check_depth(each, most - 1)


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; allowed are {_MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    if len(text) > _MAX_FLOAT_CHARS or not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _invalid(error: Exception) -> InvalidRequestError:
    if isinstance(error, RecursionError):
        return InvalidRequestError("body", f"is not JSON: more than {MAX_DEPTH} levels.")
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequestError("body", "is not JSON: a text has half of a surrogate pair, which is no character.")
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequestError("body", f"is not JSON: it is not UTF-8 ({error.reason} at byte {error.start}).")
    return InvalidRequestError("body", f"is not JSON: {error}.")


_decoder = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
