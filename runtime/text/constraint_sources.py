"""Translates constraints to grammars of llguidance, and refuses what llguidance would accept but not enforce.

Used in the processes of constraints, which import neither numpy nor jax.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from ..api.constraint import Constraint
from .json_schemas import allowed_escapes, enforceable

# Whitespace allowed between JSON tokens: none, a space, or a newline and indentation. With more freedom, some models
# never stop producing whitespace.
_JSON_OPTIONS: Any = {
    "whitespace_pattern": r"( |\n( {0,16}|\t{0,8}))?",
    "item_separator": ",",  # a schema must not override these (`x-guidance`): the output would not be JSON
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
# In llguidance's Lark dialect: comments, strings and regular expressions, in which nothing else is looked for; JSON
# schemas; references to tokens by name; and the attributes of rules that llguidance leaves to its caller, which has to
# change the temperature or to take back text.
_LARK = re.compile(
    r"""(?:\#|//)[^\n]* | "(?:[^"\\\n]|\\.)*" | /(?:[^/\\]|\\.)+/
    | (?P<json>%json\s*) | <(?P<token>[^<>\s]+)> | \b(?P<attribute>temperature|stop)\s*=""",
    re.VERBOSE | re.DOTALL,
)


def source(constraint: Constraint, shown_tokens: Mapping[str, int]) -> str:
    """Returns the grammar source that llguidance compiles.

    Args:
      shown_tokens: See `ConstraintVocabulary.shown`.

    Raises:
      ValueError: The constraint is malformed or cannot be enforced.
    """
    if constraint.kind in ("json_schema", "json_object"):
        schema, options = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}', _JSON_OPTIONS
        with contextlib.suppress(json.JSONDecodeError):  # llguidance reports the error
            given = json.loads(schema)
            schema = _as_text(enforceable(given), given, schema)
            options = options | {"json_allowed_escapes": allowed_escapes(given)}
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if constraint.kind == "choice":  # as a regex they form one lexeme; as grammar alternatives, one parser item each
        return llguidance.grammar_from("regex", "|".join(map(re.escape, constraint.choices)))
    if constraint.kind == "regex":
        return llguidance.grammar_from("regex", constraint.text)
    try:
        lark = any_to_lark(constraint.text)
    except Exception as error:  # its own exception class, and others on texts that it does not expect
        raise ValueError(f"it is neither Lark (with a rule named start) nor GBNF: {error}") from error
    return llguidance.grammar_from("lark", _enforceable_lark(lark, shown_tokens))


def _enforceable_lark(text: str, shown_tokens: Mapping[str, int]) -> str:
    """Returns a Lark grammar in which tokens that have a text are referred to by number, as llguidance takes them.

    Raises:
      ValueError: An attribute or a schema in it cannot be enforced.
    """
    parts, position = [], 0
    while (found := _LARK.search(text, position)) is not None:
        start, position = position, found.end()
        parts.append(text[start : found.start()])
        if found["attribute"]:
            raise ValueError(f"the rule attribute {found['attribute']} is not supported")
        part = found[0]
        if found["json"]:
            with contextlib.suppress(json.JSONDecodeError):
                given, position = json.JSONDecoder().raw_decode(text, found.end())
                part += _as_text(enforceable(_strict(given)), given, text[found.end() : position])
        elif (token_id := shown_tokens.get(found[0])) is not None:
            part = f"<[{token_id}]>"
        parts.append(part)
    return "".join(parts) + text[position:]


def _as_text(schema: Any, given: Any, text: str) -> str:
    """Returns a schema as text, which is `text` if the schema is the given one."""
    return text if schema is given else json.dumps(schema)


def _strict(schema: Any) -> Any:
    """Returns a schema of a Lark grammar, which may set llguidance's options, with those that would weaken it reset."""
    if not isinstance(schema, dict):
        return schema
    given = schema.get("x-guidance")
    options = given if isinstance(given, dict) else {}
    strict = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": allowed_escapes(schema)}
    return schema | {"x-guidance": options | strict | {"json_allow_general_unicode_escapes": False}}
