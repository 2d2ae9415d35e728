"""Divides answers, in pieces of every kind, into reasoning, content and tool calls."""

import json
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from meshserve.runtime.text.answers.answer_format import AnswerFormat, CallForm, Thinking, answer_format, thinking_of
from meshserve.runtime.text.answers.answer_parser import AnswerParser, _joined
from meshserve.runtime.text.answers.answer_parts import ArgumentsPart, CallPart, ContentPart, ReasoningPart

SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}}
HYBRID = "{{ '<think>' }} {{ '</think>' }} <tool_call> {"


def form(thinking: Thinking, calls: CallForm | None = None) -> AnswerFormat:
    return AnswerFormat(thinking=thinking, calls=calls, parameters={"weather": SCHEMA})


def read(expected: AnswerFormat, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns reasoning, content, and the calls with their arguments."""
    parser = AnswerParser(expected)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    content = "".join(part.text for part in parts if isinstance(part, ContentPart))
    calls: list[Any] = [[part.name, ""] for part in parts if isinstance(part, CallPart)]
    for part in parts:
        if isinstance(part, ArgumentsPart):
            calls[part.index][1] += part.text
    return reasoning, content, [(name, text) for name, text in calls]


JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln \\"}{\\"", "days": 3}}\n</tool_call>'
JSON_ARGUMENTS = '{"city": "K\\u00f6ln \\"}{\\"", "days": 3}'
XML_CALL = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nKöln <a>\n"two" lines\n</parameter>\n<parameter=days>\n3\n'
    '</parameter>\n<parameter=where>\n{"x": [1]}\n</parameter>\n</function>\n</tool_call>'
)
XML_ARGUMENTS = {"city": 'Köln <a>\n"two" lines', "days": 3, "where": {"x": [1]}}
CASES = {
    "an answer alone": (form(Thinking.NONE), "Hello <think> there", ("", "Hello <think> there", [])),
    "reasoning first": (form(Thinking.POSSIBLE), "<think>\nhm\n</think>\n\nHello", ("hm", "Hello", [])),
    "a hybrid that does not think": (form(Thinking.POSSIBLE), "Hello </think>", ("", "Hello </think>", [])),
    "an empty thought": (form(Thinking.POSSIBLE), "<think>\n\n</think>\n\nHello", ("", "Hello", [])),
    "an open prompt": (form(Thinking.OPEN), "hm, x < y\n</think>\n\nHello", ("hm, x < y", "Hello", [])),
    "thinking that is cut off": (form(Thinking.OPEN), "hm </thi", ("hm </thi", "", [])),
    "a call": (form(Thinking.NONE, CallForm.JSON), JSON_CALL, ("", "", [("weather", JSON_ARGUMENTS)])),
    "text and calls": (
        form(Thinking.POSSIBLE, CallForm.JSON),
        f"<think>\nhm <tool_call>\n</think>\n\nLet me see.\n{JSON_CALL}\n{JSON_CALL}\n",
        ("hm <tool_call>", "Let me see.", [("weather", JSON_ARGUMENTS)] * 2),
    ),
    "arguments before the name": (
        form(Thinking.NONE, CallForm.JSON),
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> and',
        ("", " and", [("f", '{"a": 1}')]),
    ),
    "arguments as text": (
        form(Thinking.NONE, CallForm.JSON),
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "no arguments": (
        form(Thinking.NONE, CallForm.JSON),
        '<tool_call>{"name": "f"}</tool_call>',
        ("", "", [("f", "{}")]),
    ),
    "no call": (
        form(Thinking.NONE, CallForm.JSON),
        f"a  <tool_call>soon</tool_call>  b <tool_call>{{]</tool_call>{JSON_CALL}",
        ("", "a  <tool_call>soon</tool_call>  b <tool_call>{]</tool_call>", [("weather", JSON_ARGUMENTS)]),
    ),
    "a call that is cut off": (
        form(Thinking.NONE, CallForm.JSON),
        '<tool_call>\n{"name": "f", "arguments": {"city": "Kö',
        ("", "", [("f", '{"city": "Kö')]),
    ),
    "a tag that is cut off": (form(Thinking.NONE, CallForm.JSON), "see <tool_c", ("", "see <tool_c", [])),
    "tags that nobody asked for": (form(Thinking.NONE), JSON_CALL, ("", JSON_CALL, [])),
    "no call as tags": (
        form(Thinking.NONE, CallForm.XML),
        "<tool_call>soon</tool_call>",
        ("", "<tool_call>soon</tool_call>", []),
    ),
    "a call without parameters": (
        form(Thinking.NONE, CallForm.XML),
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("", "", [("now", "{}")]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_are_divided_into_their_parts(name: str):
    expected, text, parts = CASES[name]
    assert read(expected, [text]) == parts


@pytest.mark.parametrize("name", CASES)
def test_the_parts_do_not_depend_on_the_pieces(name: str):
    expected, text, parts = CASES[name]
    assert read(expected, list(text)) == parts
    for size in (2, 3, 5, 7, 11, 13):
        assert read(expected, [text[at : at + size] for at in range(0, len(text), size)]) == parts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_that_are_written_as_tags_become_json(size: int):
    text = f"So:\n{XML_CALL}\n{XML_CALL}"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    reasoning, content, calls = read(form(Thinking.NONE, CallForm.XML), pieces)
    assert (reasoning, content) == ("", "So:")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", XML_ARGUMENTS)] * 2


def test_arguments_are_passed_on_as_they_come():
    parser = AnswerParser(form(Thinking.NONE, CallForm.XML))
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert parser.push("Ber") == [ArgumentsPart(0, "Ber")]
    parser = AnswerParser(form(Thinking.NONE, CallForm.JSON))
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"a": 1') == [
        CallPart(0, "f"),
        ArgumentsPart(0, '{"a": 1'),
    ]


_TEXTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", JSON_CALL, XML_CALL, "\n", " ", "{", "}", '"', "a", "é"]


@hypothesis.given(
    st.lists(st.sampled_from(_TEXTS), max_size=8),
    st.sampled_from(Thinking),
    st.sampled_from([None, *CallForm]),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_any_pieces_of_any_answer_give_the_same_parts(
    texts: list[str], thinking: Thinking, calls: CallForm | None, cuts: list[int]
):
    text = "".join(texts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    assert read(form(thinking, calls), pieces) == read(form(thinking, calls), [text])


@hypothesis.given(
    st.lists(st.sampled_from(_TEXTS), max_size=5), st.sampled_from(Thinking), st.sampled_from([None, *CallForm])
)
def test_what_is_certain_does_not_depend_on_the_pieces(texts: list[str], thinking: Thinking, calls: CallForm | None):
    """So that a stream which breaks off anywhere goes on behind it, whatever the messages were before."""
    text = "".join(texts)
    letters = AnswerParser(form(thinking, calls))
    certain: list[Any] = []
    for end in range(len(text)):
        certain += letters.push(text[end])
        at_once = AnswerParser(form(thinking, calls)).push(text[: end + 1])
        assert list(_joined(iter(certain))) == at_once, text[: end + 1]


def test_the_prompt_says_whether_the_model_thinks():
    assert thinking_of(HYBRID, "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n") is Thinking.POSSIBLE
    assert thinking_of(HYBRID, "<|im_start|>assistant\n<think>\n") is Thinking.OPEN
    assert thinking_of(HYBRID, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is Thinking.NONE
    assert thinking_of("{{ messages }}", "<think>") is Thinking.NONE


def test_the_template_says_how_tools_are_called():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    assert answer_format(HYBRID, "", tools).calls is CallForm.JSON
    assert answer_format(HYBRID + "<function=", "", tools).calls is CallForm.XML
    assert answer_format(HYBRID, "", []).calls is None
    assert answer_format(HYBRID, "", tools).parameters == {"weather": SCHEMA}
