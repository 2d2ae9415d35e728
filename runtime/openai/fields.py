"""The fields of requests: one table, from which bodies are checked and the documentation's table is made.

A field is honoured, or accepted with the only values that change nothing here, or refused with the reason. A name that
is in no table is refused, with the nearest one that is.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import InvalidRequestError
from ..api.shown import shown
from ..options.nearest import nearest

Check = Callable[[Any], bool]


class Kind(enum.Enum):
    """The JSON types of a field, and what they are called in errors."""

    TEXT = "text"
    BOOLEAN = "true or false"
    INTEGER = "a whole number"
    NUMBER = "a number"
    OBJECT = "an object"
    LIST = "a list"
    TEXT_OR_LIST = "text or a list"
    TEXT_OR_OBJECT = "text or an object"
    ANY = "JSON"

    def fits(self, value: Any) -> bool:
        """Returns whether a value is of this type."""
        return _CHECKS[self](value)


_CHECKS: Mapping[Kind, Check] = {
    Kind.TEXT: lambda value: isinstance(value, str),
    Kind.BOOLEAN: lambda value: isinstance(value, bool),
    Kind.INTEGER: lambda value: type(value) is int,
    Kind.NUMBER: lambda value: type(value) in (int, float),
    Kind.OBJECT: lambda value: isinstance(value, dict),
    Kind.LIST: lambda value: isinstance(value, list),
    Kind.TEXT_OR_LIST: lambda value: isinstance(value, str | list),
    Kind.TEXT_OR_OBJECT: lambda value: isinstance(value, str | dict),
    Kind.ANY: lambda value: True,
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """What a route does with a field."""

    kind: Kind = Kind.ANY
    note: str = ""  # for the documentation: what it does, or why it is refused
    only: tuple[Any, ...] | None = None  # the values that are accepted, because they change nothing; None: all
    is_honoured: bool = False  # it has an effect


def honoured(kind: Kind, note: str = "") -> Field:
    """A field that has an effect."""
    return Field(kind=kind, note=note, is_honoured=True)


def neutral(note: str) -> Field:
    """A field that has no effect on the answer, whatever its value."""
    return Field(note=note)


def refused(note: str, *only: Any) -> Field:
    """A field of which only the values in `only`, null and empty ones are accepted: they ask for nothing."""
    return Field(note=note, only=only)


SAMPLING: dict[str, Field] = {
    "temperature": honoured(Kind.NUMBER),
    "top_p": honoured(Kind.NUMBER),
    "top_k": honoured(Kind.INTEGER, "0 and -1 are off"),
    "min_p": honoured(Kind.NUMBER),
    "presence_penalty": honoured(Kind.NUMBER),
    "frequency_penalty": honoured(Kind.NUMBER),
    "repetition_penalty": honoured(Kind.NUMBER),
    "logit_bias": honoured(Kind.OBJECT, "by token id"),
    "allowed_token_ids": honoured(Kind.LIST),
    "bad_token_ids": honoured(Kind.LIST),
    "seed": honoured(Kind.INTEGER),
    "stop": honoured(Kind.TEXT_OR_LIST),
    "stop_token_ids": honoured(Kind.LIST),
    "ignore_eos": honoured(Kind.BOOLEAN),
    "min_tokens": honoured(Kind.INTEGER),
    "include_stop_str_in_output": honoured(Kind.BOOLEAN),
    "skip_special_tokens": honoured(Kind.BOOLEAN),
    "prompt_logprobs": honoured(Kind.INTEGER),
    "processed_logprobs": honoured(Kind.BOOLEAN, "of the distribution sampled from; an option of the server in vLLM"),
    "n": honoured(Kind.INTEGER),
    "priority": honoured(Kind.INTEGER, "larger goes first, other than in vLLM"),
    "cache_salt": honoured(Kind.TEXT),
    "max_tokens": honoured(Kind.INTEGER),
    "stream": honoured(Kind.BOOLEAN),
    "stream_options": honoured(Kind.OBJECT, "include_usage, continuous_usage_stats; include_obfuscation is accepted"),
    "return_token_ids": honoured(Kind.BOOLEAN, "adds prompt_token_ids, and token_ids and weight_spans to each choice"),
    "response_format": honoured(Kind.OBJECT, "text, json_object, json_schema"),
    "structured_outputs": honoured(Kind.OBJECT, "json, json_object, regex, choice, grammar"),
    "guided_json": honoured(Kind.TEXT_OR_OBJECT, "older spelling of structured_outputs"),
    "guided_regex": honoured(Kind.TEXT, "older spelling of structured_outputs"),
    "guided_choice": honoured(Kind.LIST, "older spelling of structured_outputs"),
    "guided_grammar": honoured(Kind.TEXT, "older spelling of structured_outputs"),
    "json_schema": honoured(Kind.TEXT_OR_OBJECT, "SGLang's spelling of structured_outputs"),
    "regex": honoured(Kind.TEXT, "SGLang's spelling of structured_outputs"),
    "ebnf": refused("use structured_outputs with a Lark grammar"),
    "spaces_between_special_tokens": refused("special tokens have no spaces of their own", True),
    "bad_words": refused("use bad_token_ids"),
    "use_beam_search": refused("outputs are sampled, not searched", False),
    "length_penalty": refused("outputs are sampled, not searched", 1, 1.0),
    "truncate_prompt_tokens": refused("a prompt is never cut; shorten it"),
}
COMMON: dict[str, Field] = {
    "model": honoured(Kind.TEXT, "the served model or an adapter, as /v1/models lists them"),
    "user": neutral("identifies an end user to OpenAI"),
    "metadata": neutral("is stored by OpenAI"),
    "store": refused("nothing is stored", False),
    "service_tier": neutral("there is one tier"),
    "safety_identifier": neutral("identifies an end user to OpenAI"),
    "prompt_cache_key": neutral("prompts are cached by their tokens; see cache_salt"),
    "prompt_cache_retention": neutral("pages are kept while there is room"),
    "guided_decoding_backend": neutral("there is one backend"),
    "request_id": neutral("use the header X-Request-Id"),
}
# What other APIs for conversations lack, under the names of `/v1/chat/completions`.
EXTENSIONS: dict[str, Field] = {
    name: SAMPLING[name]
    for name in (
        "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
        "bad_token_ids", "seed", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "priority",
        "cache_salt", "structured_outputs",
    )
} | {"chat_template_kwargs": honoured(Kind.OBJECT, "enable_thinking and other variables of the template")}  # fmt: skip
CHAT: dict[str, Field] = COMMON | SAMPLING | {
    "messages": honoured(Kind.LIST),
    "max_completion_tokens": honoured(Kind.INTEGER),
    "logprobs": honoured(Kind.BOOLEAN),
    "top_logprobs": honoured(Kind.INTEGER),
    "tools": honoured(Kind.LIST, "functions"),
    "tool_choice": honoured(Kind.TEXT_OR_OBJECT, "none, auto, required, or a function"),
    "parallel_tool_calls": honoured(Kind.BOOLEAN),
    "reasoning_effort": honoured(Kind.TEXT, "none turns thinking off; the others leave it on"),
    "enable_thinking": honoured(Kind.BOOLEAN),
    "thinking_token_budget": honoured(Kind.INTEGER, "most tokens of reasoning"),
    "include_reasoning": honoured(Kind.BOOLEAN, "false leaves the reasoning out of the answer"),
    "separate_reasoning": honoured(Kind.BOOLEAN, "SGLang's: false leaves the reasoning in the content"),
    "chat_template_kwargs": honoured(Kind.OBJECT, "enable_thinking and other variables of the template"),
    "add_generation_prompt": honoured(Kind.BOOLEAN),
    "continue_final_message": honoured(Kind.BOOLEAN),
    "echo": refused("answers do not repeat the conversation", False),
    "verbosity": refused("the model takes no such option; say it in the prompt", "medium"),
    "modalities": refused("answers are text", ["text"]),
    "audio": refused("answers are text"),
    "prediction": refused("use --draft-tokens"),
    "web_search_options": refused("the server searches nothing"),
    "functions": refused("use tools"),
    "function_call": refused("use tool_choice"),
    "documents": refused("put documents into messages"),
    "chat_template": refused("the model's own template is used; see chat_template_kwargs"),
    "add_special_tokens": refused("the chat template adds all special tokens", False),
    "mm_processor_kwargs": refused("the model reads text"),
    "logits_processors": refused("code of callers is not run"),
}  # fmt: skip
COMPLETIONS: dict[str, Field] = COMMON | SAMPLING | {
    "prompt": honoured(Kind.TEXT_OR_LIST, "text, token ids, or a list of either"),
    "logprobs": honoured(Kind.INTEGER),
    "echo": honoured(Kind.BOOLEAN, "with logprobs, also those of the prompt"),
    "best_of": refused("every sample is returned; use n", 1),
    "suffix": refused("the model continues prompts only"),
    "add_special_tokens": neutral("Qwen3's tokenizers add none"),
    "logits_processors": refused("code of callers is not run"),
}  # fmt: skip
STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"})


def checked_body(body: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Returns the fields of a body that are set.

    Raises:
      InvalidRequestError: The body is no object, or a field is unknown, refused, or of another type.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("body", f"is JSON of type {type(body).__name__}; allowed is an object.")
    found: dict[str, Any] = {}
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            near = nearest(name[:80], fields)
            hint = f"did you mean {near}?" if near else "see the documentation for what is."
            raise InvalidRequestError(name[:80], f"is not a field of this method; {hint}")
        if value is None:
            continue
        if field.only is not None:
            if value not in field.only and value not in ("", [], {}):
                raise InvalidRequestError(name, f"got {shown(value)}, which cannot be served: {field.note}.")
            continue
        if not field.kind.fits(value):
            raise InvalidRequestError(name, f"got {shown(value)}; allowed is {field.kind.value}.")
        found[name] = value
    return found


def required(body: Mapping[str, Any], name: str) -> Any:
    """Returns a field that must be set.

    Raises:
      InvalidRequestError: It is not.
    """
    if name not in body:
        raise InvalidRequestError(name, "is missing.")
    return body[name]


def whole_numbers(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Returns a list of token ids.

    Raises:
      InvalidRequestError: An item is not a whole number, 0 or more.
    """
    for index, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise InvalidRequestError(f"{name}[{index}]", f"got {shown(value, 40)}; allowed is a token id, 0 or more.")
    return tuple(values)
