"""Generates random JSON schemas and regular expressions that are supported and only allow outputs of bounded length."""

import random
import re
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "id", "Größe", "tags", "x", 'quo"te', "日本")
_STRINGS = (
    {"maxLength": 8}, {"minLength": 2, "maxLength": 5}, {"pattern": "^[a-z]{1,6}$"}, {"pattern": "^[A-Z][0-9]-(x|yz)$"},
    {"pattern": "[0-9]{3}", "maxLength": 6}, {"format": "ipv4"}, {"format": "uuid"},
)  # fmt: skip
_NUMBERS = (
    {"type": "integer", "minimum": -5, "maximum": 120}, {"type": "integer", "exclusiveMinimum": 0, "maximum": 9},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.125},  # otherwise its digits would be unbounded
    {"type": "number", "exclusiveMinimum": -3.5, "exclusiveMaximum": 20, "multipleOf": 0.5},
)  # fmt: skip


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Returns a schema whose keywords a validator can check an output against."""
    makers = [_string, _number, _enum, _simple]
    if depth:
        makers += [_array, _object, _object, _any_of]
    return rng.choice(makers)(rng, depth)


def random_document_schema(rng: random.Random) -> Schema:
    """Returns a schema as callers send them: an object, sometimes with definitions."""
    schema = _object(rng, 2)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": random_schema(rng, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
    return schema


def _string(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", **rng.choice(_STRINGS)}


def _number(rng: random.Random, depth: int) -> Schema:
    return dict(rng.choice(_NUMBERS))


def _enum(rng: random.Random, depth: int) -> Schema:
    values = ["red", "grün", 1, 2.5, None, True, [1, "a"], {"k": None}, "\n", 'say "hi"']
    chosen = rng.sample(values, rng.randint(1, 4))
    return {"const": chosen[0]} if rng.random() < 0.3 else {"enum": chosen}


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.3:
        prefix = [random_schema(rng, 0) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}
    return schema | {"items": random_schema(rng, depth - 1)}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """Returns a regex in the common syntax of Python's `re` and Rust's `regex`, which matches texts of bounded
    length.
    """
    if not depth or rng.random() < 0.2:
        return rng.choice(["a", "bc", "[a-z]", "[^x\\n]", "\\.", "[0-9]", "é", "世", "(?:yes|no)", "[A-F]{2}", "\\s"])
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    whole = "(?:" + ("|" if rng.random() < 0.4 else "").join(parts) + ")"
    return whole + rng.choice(["", "", "?", "{2}", "{0,3}", "{1,2}"])


# Parts of texts that an output must have: scripts in normal forms and out of them, and the second model's added tokens.
_FORCED = (
    "name", "größe", "gro\u0308\u00dfe", "e\u0301", "Vi\u1ec7t", "Vie\u0323\u0302t", "a\u0301\u0323", "한국",
    "\u1112\u1161\u11ab", "हिन्दी", "\u0915\u093c", "\u0958", "\u212b", "世界", "مرحبا", "\ufb1d", "👩\u200d👧", " ",
    "\n", '"', "\\", "<", "/think>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "<|im_end|>", "<|im_start|>", "<|endoftext|>",
)  # fmt: skip


def forced_text(rng: random.Random) -> str:
    """Returns a text of several scripts and added tokens."""
    return "".join(rng.choices(_FORCED, k=rng.randint(1, 5)))


def forced_schema(rng: random.Random) -> Schema:
    """Returns a schema of an object with names and values that leave little choice."""
    properties = {forced_text(rng): _forced_value(rng) for _ in range(rng.randint(1, 4))}
    return {
        "type": "object",
        "properties": properties,
        "required": rng.sample(sorted(properties), rng.randint(1, len(properties))),
        "additionalProperties": False,
    }


def _forced_value(rng: random.Random) -> Schema:
    texts = [forced_text(rng) for _ in range(3)]
    pattern = f"^{re.escape(texts[0])}[a-z]{{0,3}}({re.escape(texts[1])}|{re.escape(texts[2])})$"
    return rng.choice(
        [
            {"const": texts[0]},
            {"const": {texts[0]: [texts[1], 1]}},
            {"enum": [*texts, 5, None]},
            {"type": "string", "pattern": pattern},
            {"type": "array", "items": {"enum": texts}, "minItems": 1, "maxItems": 3},
        ]
    )


def forced_regex(rng: random.Random) -> str:
    """Returns a regex of texts that leave little choice, around a random one."""
    before, after = re.escape(forced_text(rng)), re.escape(forced_text(rng))
    return f"{before}{random_regex(rng, 2)}({after}|{re.escape(forced_text(rng))}!)"
