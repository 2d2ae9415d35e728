"""The grammar of a whole answer: reasoning, which nothing constrains but its length, then what a caller asks for.

A constraint applies to what the model tells the user. Where an answer begins with reasoning, or must be a tool call,
the constraint becomes part of a Lark grammar. Reasoning is described token by token, so that its end is the closing
token and nothing else, and its length is counted as callers count it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...api.constraint import Constraint
from ...api.errors import InvalidRequestError
from .answer_format import END_OF_THINK, THINK, AnswerFormat, CallForm, Thinking

# How JSON is written in an answer, as for constraints on whole outputs; see `constraint_sources`.
_JSON_OPTIONS = {
    "whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))?",
    "item_separator": ",",
    "key_separator": ":",
}
# In Lark: comments, strings and regular expressions, in which names are no rules.
_LARK = re.compile(r"""(?:\#|//)[^\n]* | "(?:[^"\\\n]|\\.)*" | /(?:[^/\\]|\\.)+/ | (?P<start>\bstart\b)""", re.VERBOSE)
_MAX_THINKING_TOKENS = 1 << 20


@dataclass(frozen=True)
class ToolChoice:
    """The functions of which an answer must call one: by name, the JSON schemas of their parameters."""

    functions: Mapping[str, Mapping[str, Any]]


def answer_constraint(
    form: AnswerFormat,
    constraint: Constraint | None,
    choice: ToolChoice | None = None,
    *,
    max_thinking_tokens: int | None = None,
    place: str = "",
) -> Constraint | None:
    """Returns the constraint on a whole answer; None if anything goes.

    Args:
      form: What the answer will look like.
      constraint: On the content.
      choice: The tools of which one must be called.
      max_thinking_tokens: Most tokens of reasoning; None leaves its length open.
      place: What stands before the names of these options in the request.

    Raises:
      InvalidRequestError: The options contradict each other, or the model cannot do what they ask for.
    """
    if choice is not None and constraint is not None:
        message = "demands a tool call, and the output is constrained, too; omit one."
        raise InvalidRequestError(f"{place}tool_choice", message)
    if choice is not None and form.calls is None:
        message = "the model's chat template shows no tool calls; it cannot call tools."
        raise InvalidRequestError(f"{place}tool_choice", message)
    if max_thinking_tokens is not None:
        _check_budget(f"{place}thinking_token_budget", form, max_thinking_tokens)
    if form.thinking is Thinking.NONE:
        max_thinking_tokens = None
    if choice is None and (form.thinking is Thinking.NONE or (constraint is None and max_thinking_tokens is None)):
        return constraint
    rules = [*_thought(form, max_thinking_tokens)]
    if choice is not None:
        rules += _calls(form, choice)
    elif constraint is not None:
        rules += _content(constraint)
    else:
        rules.append(f"answer: {_tokens_but(form.end_token_ids)}*")
    return Constraint(kind="grammar", text="\n".join(rules) + "\n")


def _check_budget(field: str, form: AnswerFormat, max_thinking_tokens: int) -> None:
    if not 0 <= max_thinking_tokens <= _MAX_THINKING_TOKENS:
        raise InvalidRequestError(field, f"got {max_thinking_tokens}; allowed is 0 to {_MAX_THINKING_TOKENS}.")
    if form.thinking is not Thinking.NONE and form.think_token_ids is None:
        raise InvalidRequestError(field, f"needs a model whose tokenizer has {THINK} and {END_OF_THINK} as tokens.")


def _thought(form: AnswerFormat, max_tokens: int | None) -> Iterator[str]:
    """Yields the rules of the reasoning, and the start rule."""
    if form.thinking is Thinking.NONE:
        yield "start: answer"
        return
    # Models write two line breaks after their reasoning.
    first = "thought" if form.thinking is Thinking.OPEN else "(opening thought)?"
    yield f"start: {first} answer"
    if form.think_token_ids is None:
        yield f"opening: {json.dumps(THINK)}"
        yield f"thought: reasoning /\\n{{0,2}}/\nreasoning[suffix={json.dumps(END_OF_THINK)}]: /(.|\\n)*/"
        return
    opening, closing = form.think_token_ids
    count = "*" if max_tokens is None else f"{{0,{max_tokens}}}"
    yield f"opening: <[{opening}]>"
    yield f"thought: {_tokens_but((closing, *form.end_token_ids))}{count} <[{closing}]> /\\n{{0,2}}/"


def _tokens_but(token_ids: tuple[int, ...]) -> str:
    return f"<[^{','.join(map(str, token_ids))}]>" if token_ids else "<[*]>"


def _content(constraint: Constraint) -> Iterator[str]:
    """Yields the rules of constrained content."""
    if constraint.kind in ("json_schema", "json_object"):
        yield f"answer: %json {_schema(constraint)}"
    elif constraint.kind == "choice":
        yield "answer: " + " | ".join(map(_text, constraint.choices))
    elif constraint.kind == "regex":
        yield f"answer: /{_slashes_escaped(constraint.text)}/"
    else:
        if not re.search(r"^\s*\??start\b", constraint.text, re.MULTILINE):
            raise InvalidRequestError(constraint.field, "after reasoning, it must be Lark with a rule named start.")
        yield _LARK.sub(lambda found: "answer" if found["start"] else found[0], constraint.text)


def _schema(constraint: Constraint) -> str:
    try:
        schema = json.loads(constraint.text) if constraint.text else {"type": "object"}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(constraint.field, f"is not JSON: {error}. Send a JSON schema.") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(constraint.field, f"is JSON of type {type(schema).__name__}; allowed is an object.")
    return _json_rule(schema if isinstance(schema, dict) else {} if schema else {"not": {}})


def _json_rule(schema: Mapping[str, Any]) -> str:
    given = schema.get("x-guidance")
    options = given if isinstance(given, dict) else {}
    return json.dumps({**schema, "x-guidance": {**options, **_JSON_OPTIONS}})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashes_escaped(pattern: str) -> str:
    """Returns a regular expression as Lark writes it, between slashes."""
    written = {"/": r"\/", "\n": r"\n"}
    return re.sub(r"(\\.)|/|\n", lambda found: found[1] or written[found[0]], pattern, flags=re.DOTALL)


def _calls(form: AnswerFormat, choice: ToolChoice) -> Iterator[str]:
    """Yields the rules of an answer that calls one of the functions, in the form in which the model writes calls."""
    names = [f"call_{index}" for index in range(len(choice.functions))]
    yield f'answer: "<tool_call>\\n" ({" | ".join(names)}) "\\n</tool_call>"'
    for rule, (name, schema) in zip(names, choice.functions.items(), strict=True):
        if form.calls is CallForm.JSON:
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            yield f'{rule}: {_text(head)} %json {_json_rule({"type": "object", **schema})} "}}"'
        else:
            yield from _tagged_call(rule, name, schema)


def _tagged_call(rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rules of a call as tags. Parameters come in the order of the schema."""
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    parts = []
    for index, (key, of_key) in enumerate(properties.items()):
        parts.append(f"{rule}_{index}" + ("" if key in required else "?"))
        kind = of_key.get("type", "string") if isinstance(of_key, dict) else "string"
        begin = _text(f"<parameter={key}>\n")
        if isinstance(of_key, dict) and "enum" in of_key and all(isinstance(item, str) for item in of_key["enum"]):
            value = "(" + " | ".join(map(_text, of_key["enum"])) + r') "\n</parameter>\n"'
        elif kind == "string":
            value = f"{rule}_{index}_value"
            yield value + r'[suffix="\n</parameter>\n"]: /(.|\n)*/'
        else:
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            value = f"%json {_json_rule({**definitions, **of_key})}" + r' "\n</parameter>\n"'
        yield f"{rule}_{index}: {begin} {value}"
    yield f'{rule}: {_text(f"<function={name}>" + chr(10))} {" ".join(parts)} "</function>"'
