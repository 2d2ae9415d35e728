"""Makes up for what llguidance accepts in a JSON schema but does not enforce. Serves `constraint_sources`."""

import functools
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import llguidance

_MAX_EXACT_INT = 2**53
_ESCAPES = 'nrbtf\\"'  # characters after a backslash in strings
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[xuc0]")  # or such an escape in a pattern
_VALUES = ("const", "enum", "default", "examples")  # keywords with values, in which there are no schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # with a schema by name


def enforceable(schema: Any) -> Any:
    """Returns a schema with the same meaning that llguidance enforces; the same object if it is one already.

    Raises:
      ValueError: An integer of `const` or `enum` is not represented exactly. The message names it.
    """
    _check_numbers(schema, is_written=False)
    names = tuple(dict.fromkeys(_strings(schema)))  # in the same order in every process
    return _with_listed_names(schema, names) if "patternProperties" in names else schema


def allowed_escapes(schema: Any) -> str:
    """Returns the characters that may follow a backslash in strings.

    Without `u`, a control character that has no letter cannot be written. With it, llguidance also lets other
    characters of a property's name be written as numbers, but not see that it is a name which `properties` has.

    Raises:
      ValueError: The schema needs control characters, and it has such properties.
    """
    if not any(map(_CONTROL.search, _strings(schema))):
        return _ESCAPES
    if _is_open(schema):
        raise ValueError("a schema with control characters needs additionalProperties: false beside all properties")
    return _ESCAPES + "u"


def _is_open(schema: Any) -> bool:
    """Returns whether an object in a schema has properties and may have others."""
    if isinstance(schema, list):
        return any(map(_is_open, schema))
    if not isinstance(schema, dict):
        return False
    has_names = any(schema.get(key) for key in ("properties", "patternProperties"))
    is_open = has_names and schema.get("additionalProperties", True) is not False
    return is_open or any(_is_open(part) for key, part in schema.items() if key not in _VALUES)


def _check_numbers(schema: Any, *, is_written: bool) -> None:
    """Checks that float64, which llguidance uses for numbers, represents the integers of `const` and `enum` exactly.

    Raises:
      ValueError: See `enforceable`.
    """
    if isinstance(schema, dict):
        for key, value in schema.items():
            _check_numbers(value, is_written=is_written or key in ("const", "enum"))
    elif isinstance(schema, list):
        for value in schema:
            _check_numbers(value, is_written=is_written)
    elif is_written and isinstance(schema, int) and abs(schema) > _MAX_EXACT_INT:
        raise ValueError(f"{schema} in const or enum is beyond 2^53, where integers are not represented exactly")


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
    elif isinstance(value, dict):
        yield from value
        for part in value.values():
            yield from _strings(part)


def _with_listed_names(schema: Any, names: Collection[str]) -> Any:
    """Returns a schema in which patterns that only some of `names` match are replaced by properties.

    llguidance lets an object continue with another property if a pattern is left, also if `properties` has all names
    that match it, here or in a schema that is merged with this one. Then nothing could follow.

    Args:
      names: All names of properties in the whole schema; others do no harm.
    """
    if isinstance(schema, list):
        return [_with_listed_names(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            changed[key] = {name: _with_listed_names(part, names) for name, part in value.items()}
        else:
            changed[key] = value if key in _VALUES else _with_listed_names(value, names)
    patterns, properties = changed.get("patternProperties"), changed.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return changed
    others = _all_names({"patternProperties": dict.fromkeys(patterns, False)}, names)
    if others is not None and patterns:
        properties = dict.fromkeys([*properties, *others], changed.get("additionalProperties", True)) | properties
        changed["additionalProperties"] = False
    for pattern in tuple(patterns):
        candidates = names if "$" in pattern else ()  # without an end, it matches endlessly many names or none
        listed = _all_names({"patternProperties": {pattern: True}, "additionalProperties": False}, candidates)
        if listed is not None:
            part = patterns.pop(pattern)
            merged = {name: {"allOf": [properties[name], part]} if name in properties else part for name in listed}
            properties |= merged
    return changed | {"properties": properties}


def _all_names(schema: dict[str, Any], names: Collection[str]) -> list[str] | None:
    """Returns the names that properties of an object may have, if all of them are among `names`, or else None."""
    matcher = _matcher(schema)
    if matcher.is_error():  # the whole schema will be refused, too
        return None
    allowed = [name for name in names if _begins(matcher, "{" + json.dumps(name, ensure_ascii=False) + ":")]
    rest = _matcher(schema | {"properties": dict.fromkeys(allowed, False)})
    return None if rest.is_error() or _begins(rest, '{"') else allowed


def _matcher(schema: dict[str, Any]) -> llguidance.LLMatcher:
    options: Any = {"json_allowed_escapes": _ESCAPES}  # one spelling of a name
    source = llguidance.LLMatcher.grammar_from_json_schema({"type": "object", **schema}, overrides=options)
    return llguidance.LLMatcher(_bytes_as_tokens(), source, log_level=0)


def _begins(matcher: llguidance.LLMatcher, text: str) -> bool:
    """Returns whether an allowed text may begin with `text`."""
    token_ids = list(text.encode(errors="surrogatepass"))
    return matcher.validate_tokens(token_ids) == len(token_ids)


@functools.cache
def _bytes_as_tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")
