"""Constraints that are sent to be compiled: those that have done harm, and random ones.

To add one, add an entry to `CORPUS`.
"""

import json
import random
import string
from collections.abc import Mapping
from typing import Any

from meshserve.protos import inference_pb2 as pb
from tests.runtime.schemas import random_document_schema, random_regex


def chained_rules(number: int) -> str:
    """Returns a Lark grammar of rules that each refer to the next one."""
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(number)) + f'r{number}: "a"\n'


def chained_terminals(number: int) -> str:
    """Returns a Lark grammar of terminals that are each the complement of the next one."""
    return "start: T0\n" + "".join(f"T{i}: ~T{i + 1}\n" for i in range(number)) + f'T{number}: "a"\n'


def chained_references(number: int) -> str:
    """Returns a JSON schema of definitions that each refer to the next one."""
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(number)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{number}": {"type": "integer"}}})


def nested_schema(number: int) -> str:
    """Returns a JSON schema of arrays in arrays."""
    return '{"type":"array","items":' * number + "{}" + "}" * number


AMBIGUOUS = "start: s\ns: s s | /./"
VERY_AMBIGUOUS = 'start: s\ns: s s s | s s | "a" | "b"'

# The constraint, and words of the refusal. None: it is served, or refused in time, without harm to others.
CORPUS: Mapping[str, tuple[dict[str, Any], str | None]] = {
    "3,500 chained rules": ({"grammar": chained_rules(3_500)}, "has rules 3502"),
    "1,990 chained rules": ({"grammar": chained_rules(1_990)}, None),
    "3,500 chained terminals": ({"grammar": chained_terminals(3_500)}, "has rules 3502"),
    "1,990 chained terminals": ({"grammar": chained_terminals(1_990)}, None),
    "1,300 chained definitions": ({"json_schema": chained_references(1_300)}, "has references 1301"),
    "990 chained definitions": ({"json_schema": chained_references(990)}, None),
    "8,000 times .*": ({"regex": ".*" * 8_000}, "constraint_memory_mib"),
    "30,000 times .*": ({"regex": ".*" * 30_000}, "constraint_memory_mib"),
    "multiples of 3,000,017": ({"json_schema": '{"type":"integer","multipleOf":3000017}'}, "constraint_memory_mib"),
    "an ambiguous grammar": ({"grammar": AMBIGUOUS}, None),
    "a very ambiguous grammar": ({"grammar": VERY_AMBIGUOUS}, None),
    "nested repetitions": ({"regex": "(((a{100}){100}){100}){100}"}, None),
    "a large repetition": ({"regex": "(ab?c){60000}"}, None),
    "parentheses": ({"regex": "(" * 5_000 + "a" + ")" * 5_000}, "has depth 5000"),
    "nested arrays": ({"json_schema": nested_schema(2_000)}, "has depth 2001"),
    "brackets of GBNF": ({"grammar": "root ::= " + "(" * 30_000}, "has depth 30000"),
    "a rule of itself": ({"grammar": "start: start"}, None),
    "empty rules": ({"grammar": "start: a a a a\na: | b\nb: | a"}, None),
    "a schema of itself": ({"json_schema": '{"$ref":"#"}'}, None),
    "a wide schema": (
        {"json_schema": json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(1_500)}})},
        None,
    ),
    "an empty text": ({"choice": [""]}, "choice"),
    "1,024 long choices": ({"choice": [f"{i:04}" + "x" * 59 for i in range(1_024)]}, None),
    "a null byte": ({"regex": "\x00"}, None),
    "lone escapes": ({"regex": "\\" * 999}, None),
    "a bound beyond 64 bits": ({"json_schema": '{"type":"integer","minimum":1e400}'}, None),
    "a pattern that cannot match": ({"json_schema": '{"type":"string","pattern":"[^\\\\s\\\\S]"}'}, None),
}


def message(kind: Mapping[str, Any]) -> pb.Constraint:
    """Returns a constraint as it is sent."""
    [(name, value)] = kind.items()
    return pb.Constraint(choice=pb.Choice(texts=value)) if name == "choice" else pb.Constraint(**{name: value})


def random_constraint(draw: random.Random) -> pb.Constraint:
    """Returns a random constraint: mostly valid, some with damage, some large."""
    kind = draw.choice(["regex", "json_schema", "grammar", "choice", "json_object"])
    if kind == "json_object":
        return pb.Constraint(json_object=True)
    if kind == "choice":
        return message({kind: [_word(draw) for _ in range(draw.choice([1, 3, 40]))]})
    makers = {"regex": random_regex, "json_schema": _schema, "grammar": random_lark}
    text = makers[kind](draw)
    if kind == "regex" and draw.random() < 0.1:
        text = f"({text}){{{draw.choice([1, 30, 1000])}}}"
    if draw.random() < 0.15:
        text = _damaged(draw, text)
    return pb.Constraint(**{kind: text})


def _schema(draw: random.Random) -> str:
    return json.dumps(random_document_schema(draw))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_letters + " é世\n", k=draw.randint(1, 12)))


def _damaged(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    return (
        text[:at] + draw.choice(["(", "[", "{", "}", '"', "\\", "|", "\x00", "$", ""]) + text[at + draw.randrange(3) :]
    )


def random_lark(draw: random.Random) -> str:
    """Returns a grammar whose rules refer to any others, themselves included: ambiguous ones among them."""
    names = ["start", *(f"r{i}" for i in range(draw.choice([1, 2, 5, 40])))]
    return "\n".join(f"{name}: {_alternatives(draw, names)}" for name in names)


def _alternatives(draw: random.Random, names: list[str]) -> str:
    def item() -> str:
        found = draw.choice(
            [lambda: draw.choice(names), lambda: f'"{draw.choice("ab01")}"', lambda: draw.choice(["/[a-z]+/", "/./"])]
        )()
        return found + draw.choice(["", "", "", "?", "*", "+"])

    return " | ".join(" ".join(item() for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 3)))
