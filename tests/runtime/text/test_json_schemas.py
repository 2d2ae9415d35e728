"""JSON schemas that llguidance would accept but not enforce, followed by random walks over bytes instead of tokens."""

import json
import random
import subprocess
import sys
from typing import Any

import jsonschema
import llguidance
import pytest

from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.text.constraint_sources import source
from meshserve.runtime.text.json_schemas import enforceable

BYTES = llguidance.LLTokenizer("byte")
MAX_BYTES = 1_000
WHITESPACE = frozenset(b" \n\t")
CLOSING = frozenset(b'"]}')


def walk(schema: Any, rng: random.Random) -> str | None:
    """A text that the schema allows, or None if the schema is refused or its texts are long."""
    grammar = source(Constraint(kind="json_schema", text=json.dumps(schema)), {})
    matcher, text = llguidance.LLMatcher(BYTES, grammar, log_level=0), bytearray()
    if matcher.is_error():
        return None
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), (schema, bytes(text), matcher.get_error())
        allowed = {index for index in range(mask.bit_length()) if mask >> index & 1}
        if BYTES.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            break
        allowed -= {BYTES.eos_token}
        allowed = allowed - WHITESPACE or allowed
        if len(text) > 60:
            allowed = allowed & CLOSING or allowed
        if len(text) > MAX_BYTES:
            return None
        text.append(rng.choice(sorted(allowed)))
        assert matcher.consume_token(text[-1])
    return text.decode()


def check(schema: Any, rng: random.Random) -> bool:
    """Checks that a text which the schema allows is valid. Returns False if there is none."""
    if (text := walk(schema, rng)) is None:
        return False
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    return True


OVERLAPPING = [
    ({"a": {"minimum": 5}}, {"^a$": {"maximum": 7}}),
    ({"a": True}, {"^(a|b)$": {"minimum": 5}, "^$": {"const": 1}}),
    ({"a": {"maximum": 9}, "b": {"maximum": 9}}, {"^[ab]$": True}),
    ({"a": True}, {"^a": {"maximum": 7}, "^b": {"maximum": 3}}),
    ({"a": True}, {"^c": True, r"[^\w\W]": True}),  # the last one matches nothing
    ({"b": {"minimum": 9}}, {"^[^b]": True, r"^b[\s\S]": True, "^$": True}),  # all names but "b"
    ({'é"\n': True}, {'^é"\n$': True}),
]


@pytest.mark.parametrize("additional", [False, {"const": 0}], ids=["closed", "open"])
@pytest.mark.parametrize(("properties", "patterns"), OVERLAPPING)
def test_properties_beside_patterns_that_match_their_names(properties: dict, patterns: dict, additional: object):
    """Also if they are in two parts of a schema that are merged, and in a part that is referred to by its place."""
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {name: {"allOf": [number, part]} for name, part in properties.items()},
        "patternProperties": {pattern: {"allOf": [number, part]} for pattern, part in patterns.items()},
        "additionalProperties": additional,
    }
    parts = [{"type": "object", part: schema[part]} for part in ("properties", "patternProperties")]
    rng = random.Random(1)
    for whole in (schema, {"allOf": parts}, {"$ref": "#/somewhere/else", "somewhere": {"else": schema}}):
        assert all([check(whole, rng) for _ in range(10)])


def test_no_other_spelling_of_a_name_escapes_its_schema():
    """As "\\u0061" is the name "a", too. Control characters are written where the schema has them."""
    assert not begins({"type": "object", "properties": {"a": {"const": 1}}}, r'{"\u')
    assert not begins({"type": "object", "properties": {"a/": {"const": 1}}}, '{"a\\/')
    assert begins({"type": "object", "properties": {"a": {"const": 1}}}, '{"a\\n')
    closed = {"type": "object", "properties": {"a": {"const": "\x01"}}, "additionalProperties": False}
    rng = random.Random(0)
    for schema in (
        closed,
        {"const": "\x01\x1f"},
        {"enum": [{"\x02": "\x7f"}]},
        {"pattern": r"^\x03$", "type": "string"},
    ):
        assert check(schema, rng)
    with pytest.raises(ValueError, match="needs additionalProperties: false"):
        walk(closed | {"additionalProperties": True}, rng)


def begins(schema: Any, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, source(Constraint(kind="json_schema", text=json.dumps(schema)), {}))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode())


def test_other_patterns_and_values_are_left_as_they_are():
    for schema in (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": {}}, "additionalProperties": False},
        {"const": {"patternProperties": {"^a$": {}}, "a": 1}},
        {"properties": {"patternProperties": {"type": "string"}, "a": {"enum": [{"patternProperties": {"a": 1}}]}}},
    ):
        assert enforceable(schema) == schema | ({} if "const" in schema else {"properties": schema["properties"]})
    plain = {"type": "object", "properties": {"a": {"const": 1.0}}}
    assert enforceable(plain) is plain


def test_the_order_of_properties_is_the_same_in_every_process():
    """So that a seed gives the same tokens on another server."""
    schema = {"properties": {"x": {}}, "patternProperties": {"^(g|f|e|d|c|b|a)$": {"enum": list("dacbefg")}}}
    script = "import json, sys; from meshserve.runtime.text.json_schemas import enforceable\n"
    script += "print(list(enforceable(json.loads(sys.argv[1]))['properties']))"
    ran = subprocess.run([sys.executable, "-c", script, json.dumps(schema)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(["x", *"dacbefg"])


@pytest.mark.parametrize("part", [[], 3, "a", None, [["a", 1]]])
def test_malformed_schemas_are_left_to_llguidance(part: Any):
    for key in ("properties", "patternProperties", "additionalProperties", "required", "allOf", "$defs"):
        walk({"properties": {"a": {}}, "patternProperties": {"^a$": {}}, "type": "null", key: part}, random.Random(0))


NAMES = ("a", "b", "ab", "bc", "x")
PATTERNS = ("^a", "^a$", "^(a|b)$", "b$", "^[ab]+$", "^x", "^(x|bc)$", ".*", "^$", "^[^a]", "c")
SIMPLE: tuple[Any, ...] = (
    {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": 0, "maximum": 20, "multipleOf": 7},
    {"const": 1}, {"const": {"x": 1}}, {"enum": ["a", "b", 2, None]}, {"enum": [{"a": 1}, {"b": 2, "a": 3}]},
    {"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^[ab]{0,2}$"}, {"type": ["null", "boolean"]},
    {"type": "boolean"}, {"$ref": "#/$defs/part"}, True, False,
)  # fmt: skip


def random_overlapping(rng: random.Random, depth: int) -> Any:
    """A schema whose objects have properties and patterns for few names, often in parts that are merged."""
    choice = rng.random() if depth else 0.0
    if choice < 0.3:
        return rng.choice(SIMPLE)
    if choice < 0.75:
        return _random_object(rng, depth - 1)
    if choice < 0.95:
        return {rng.choice(["allOf", "anyOf"]): [random_overlapping(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    return {"type": "array", "items": random_overlapping(rng, depth - 1), "maxItems": 2}


def _random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if rng.random() < 0.7:
        schema["properties"] = {name: random_overlapping(rng, depth) for name in rng.sample(NAMES, rng.randint(0, 3))}
    if rng.random() < 0.6:
        patterns = rng.sample(PATTERNS, rng.randint(1, 2))
        schema["patternProperties"] = {pattern: random_overlapping(rng, depth) for pattern in patterns}
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, random_overlapping(rng, depth)])
    if rng.random() < 0.4:
        schema["required"] = rng.sample(NAMES, rng.randint(1, 2))
    return schema


def test_random_objects_with_overlapping_names_are_right_or_refused(num_structured: int):
    rng = random.Random(3)
    plain = [part for part in SIMPLE if part != {"$ref": "#/$defs/part"}]
    schemas = [
        {"allOf": [random_overlapping(rng, 3)], "$defs": {"part": rng.choice(plain)}}
        for _ in range(max(60, num_structured))
    ]
    num_checked = sum(check(schema, rng) for schema in schemas for _ in range(3))
    assert num_checked > len(schemas)
