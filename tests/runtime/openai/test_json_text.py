"""JSON of callers: what is refused, and that both parsers read what the standard library reads."""

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.shown import shown
from meshserve.runtime.openai import json_text

MAX_VALUES = 1_000
PARSERS: dict[str, Callable[[bytes], Any]] = {
    "at once": json_text.parsed,
    "in pieces": lambda data: json_text.parsed_in_pieces(data, MAX_VALUES),
}
SCALARS = [1, -2, 1.5, 1e10, "a", 'ü😀\\"\n', True, False, None, 0, -0.5e-3, ""]


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random() if depth < 4 else 0.0
    if kind < 0.5:
        return draw.choice(SCALARS)
    if kind < 0.65:
        return [draw.randrange(1000) for _ in range(draw.randrange(9))]
    if kind < 0.8:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {draw.choice("abé") * draw.randrange(3): random_value(draw, depth + 1) for _ in range(draw.randrange(5))}


def random_text(draw: random.Random) -> bytes:
    """Returns JSON, or what was JSON before one character has changed."""
    value, separators = random_value(draw), draw.choice([None, (",", ":")])
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]), separators=separators)
    data = text.encode()
    if draw.random() < 0.5:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.choice(b'[]{},:"0 1-e.tn\\')]) + data[place + draw.randrange(2) :]
    return data


def expected(data: bytes) -> Any:
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return InvalidRequestError
    return value


@pytest.mark.parametrize("name", PARSERS)
def test_values_are_those_of_the_standard_library(name: str, monkeypatch):
    monkeypatch.setattr(json_text, "_PIECE_CHARS", 7)
    num_refused = 0
    for seed in range(2_000):
        data = random_text(random.Random(seed))
        try:
            found = PARSERS[name](data)
        except InvalidRequestError:
            found = InvalidRequestError
            num_refused += 1
        assert found == expected(data), data
    assert 100 < num_refused < 1_500


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 100_000, "more than 128 levels"),
        (b"[" * 129 + b"]" * 129, "more than 128 levels"),
        (b'{"a":' * 100_000, "more than 128 levels"),
        (b"9" * 100_000, "digits; allowed are 20"),
        (b"[" + b"9" * 21 + b"]", "a number has 21 digits"),
        (b"[1e400]", "1e400 is too large"),
        (b"[0." + b"1" * 500 + b"]", "is too large|Expecting"),
        (b"[NaN]", "NaN is no number|Expecting"),
        (b"[-Infinity]", "-Infinity is no number|Expecting"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\udc00\\ud800": 1}', "half of a surrogate pair"),
        (b'["\xed\xa0\x80"]', "it is not UTF-8"),
        ('["a"]'.encode("utf-16"), "it is not UTF-8"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"[1,]", "Expecting value"),
        (b"[1,,2]", "Expecting value"),
        (b"[tru]", "Expecting value"),
    ],
    ids=range(18),
)
def test_what_is_refused(name: str, data: bytes, reason: str):
    with pytest.raises(InvalidRequestError, match=reason):
        PARSERS[name](data)


def test_a_text_may_have_so_many_values(monkeypatch):
    parse = PARSERS["in pieces"]
    assert len(parse(b"[" + b"[],[]," * ((MAX_VALUES - 4) // 2) + b"[]]")) == MAX_VALUES - 3
    for many in (b"[],", b'"a",', b'{"a":1},'):
        with pytest.raises(InvalidRequestError, match="more than 1000 values"):
            parse(b"[" + many * MAX_VALUES + b"1]")
    assert len(parse(b"[" + b"1," * 100_000 + b"1]")) == 100_001  # numbers of a list do not count
    monkeypatch.setattr(json_text, "MAX_NUMBERS", 10_000)
    with pytest.raises(InvalidRequestError, match="more than 10000 numbers"):
        parse(b"[" + b"1," * 100_000 + b"1]")


@pytest.mark.parametrize(
    "value",
    [
        *(["a,[", *range(number)] for number in range(8)),
        (), {}, None, "a", {"a": 1, "b": [None, {"c": 0.5, "d": "}"}, {}]}, [[1, 2, 3, 4], [], {"a": [()]}],
    ],
    ids=str,
)  # fmt: skip
def test_values_are_written_in_pieces(monkeypatch, value):
    written: list[int] = []

    def dumps(value):
        written.append(len(value) if isinstance(value, list | tuple | dict) else 1)
        return json.dumps(value)

    monkeypatch.setattr(json_text, "json", SimpleNamespace(dumps=dumps))
    monkeypatch.setattr(json_text, "_PIECE_ITEMS", 3)
    assert json_text.in_pieces(value) == json.dumps(value)
    assert max(written, default=0) <= 3


@pytest.mark.parametrize("value", ["a", 1, None, [1, "b"], {"a": [1, {"b": 2.5}]}, [], {}])
def test_small_values_are_shown_whole(value):
    assert shown(value) == repr(value)


def test_the_rest_of_large_values_is_not_read():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[[[[...]]]]"
    assert shown("a" * 10**6, 10) == "'aaaaaaaaa"
    assert shown([1] * 10**6) == "[1, 1, 1, 1, 1, 1, 1, 1, ...]"
    while deep:  # without recursion
        deep = deep[0]
