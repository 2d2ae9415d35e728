"""Converts the fields of a body to sampling parameters, options and a constraint."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..api.constraint import Constraint
from ..api.errors import InvalidRequestError
from ..api.request import RequestOptions
from ..api.sampling_params import SamplingParams, params_table, without_unset
from ..api.shown import shown
from .fields import STREAM_OPTIONS

# Names of fields that `SamplingParams` calls otherwise.
_RENAMED = {"include_stop_str_in_output": "include_stop", "max_completion_tokens": "max_tokens"}
_MAX_TOKEN_DIGITS = 20
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


def sampling_params(
    body: Mapping[str, Any], defaults: Mapping[str, Any], *, logprobs: int | None, constraint: Constraint | None
) -> SamplingParams:
    """Returns the sampling parameters of a body.

    Args:
      body: The fields that are set.
      defaults: The model's own defaults.
      logprobs: Number of alternatives to report with each token's log-probability; None reports nothing.
      constraint: The format of the output.

    Raises:
      InvalidRequestError: A value is out of range.
    """
    known = params_table().keys() - {"logprobs", "constraint", "num_resumed_tokens"}
    given: dict[str, Any] = {}
    for name, value in body.items():
        name = _RENAMED.get(name, name)
        if name in known:
            given[name] = _converted(name, value)
    given = without_unset(given) | {"logprobs": logprobs, "constraint": constraint}
    return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def _converted(name: str, value: Any) -> Any:
    if name == "stop":
        value = [value] if isinstance(value, str) else value
    if isinstance(value, list):
        kind = str if name == "stop" else int
        for index, item in enumerate(value):
            if type(item) is not kind:
                allowed = "text" if kind is str else "a token id"
                raise InvalidRequestError(f"{name}[{index}]", f"got {shown(item, 40)}; allowed is {allowed}.")
        return tuple(value)
    if name == "logit_bias":
        return dict(_biases(value))
    return value


def _biases(value: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    for key, bias in value.items():
        if not key.isdecimal() or len(key) > _MAX_TOKEN_DIGITS or type(bias) not in (int, float):
            message = f"got {shown(key, 40)}: {shown(bias, 40)}; allowed are token ids and numbers."
            raise InvalidRequestError("logit_bias", message)
        yield int(key), float(bias)


def request_options(body: Mapping[str, Any]) -> RequestOptions:
    """Returns the options of a request. Raises InvalidRequestError if a value is out of range."""
    return RequestOptions(**{name: body[name] for name in ("priority", "cache_salt", "n") if name in body})


def constraint_of(body: Mapping[str, Any]) -> Constraint | None:
    """Returns the format of the output that a body asks for, in any of the spellings.

    Raises:
      InvalidRequestError: Two are asked for, or one is not valid.
    """
    found = dict(_constraints(body))
    if len(found) > 1:
        raise InvalidRequestError(next(iter(found)), f"only one of these may be set: {', '.join(found)}.")
    return next(iter(found.values()), None)


def _constraints(body: Mapping[str, Any]) -> Iterator[tuple[str, Constraint]]:
    if (form := body.get("response_format")) is not None and (constraint := _response_format(form)) is not None:
        yield "response_format", constraint
    if (structure := body.get("structured_outputs")) is not None:
        names = [name for name in structure if structure[name] is not None]
        if len(names) != 1 or names[0] not in _STRUCTURES:
            message = f"got {', '.join(names)[:80] or 'none'}; allowed is exactly one of {', '.join(_STRUCTURES)}."
            raise InvalidRequestError("structured_outputs", message)
        if names[0] != "json_object" or structure["json_object"]:
            yield "structured_outputs", _structure(f"structured_outputs.{names[0]}", names[0], structure[names[0]])
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if name in body:
            yield name, _structure(name, name.removeprefix("guided_"), body[name])
    for name, kind in (("json_schema", "json"), ("regex", "regex")):
        if name in body:
            yield name, _structure(name, kind, body[name])


def _response_format(form: Mapping[str, Any]) -> Constraint | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind="json_object")
    if kind == "json_schema":
        described = form.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict | bool):
            raise InvalidRequestError(
                "response_format.json_schema.schema", f"got {shown(schema)}; allowed is a schema."
            )
        return _structure("response_format.json_schema.schema", "json", schema)
    raise InvalidRequestError(
        "response_format.type", f"got {shown(kind, 40)}; allowed are text, json_object, json_schema."
    )


def _structure(field: str, kind: str, value: Any) -> Constraint:
    """Returns a constraint of vLLM's kinds."""
    if kind == "json_object":
        return Constraint(kind="json_object")
    if kind == "json":
        return Constraint(kind="json_schema", text=value if isinstance(value, str) else json.dumps(value))
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidRequestError(field, f"got {shown(value)}; allowed is a list of texts.")
        return Constraint(kind="choice", choices=tuple(value))
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"got {shown(value)}; allowed is text.")
    return Constraint(kind="regex" if kind == "regex" else "grammar", text=value)


def stream_options(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether a stream ends with the usage, and whether every message has it.

    Raises:
      InvalidRequestError: An option is unknown, or nothing is streamed.
    """
    options = body.get("stream_options", {})
    for name, value in options.items():
        if name not in STREAM_OPTIONS or not isinstance(value, bool | None):
            message = f"got {shown(value, 40)}; allowed are {', '.join(sorted(STREAM_OPTIONS))}, true or false."
            raise InvalidRequestError(f"stream_options.{name}"[:80], message)
    if options and not body.get("stream"):
        raise InvalidRequestError("stream_options", "is set, but stream is not.")
    return bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))
