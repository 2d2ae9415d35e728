"""Converts messages of a conversation, in OpenAI's forms or in ours, to ChatMessage of inference.proto.

What the chat templates of Qwen3 have no place for, such as the name of a participant, is left out. What they cannot
express, such as an image, is refused by the place at which it stands.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshserve.protos import inference_pb2 as pb

from ..api.errors import InvalidRequestError
from ..api.shown import shown

_KEYS = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name", "refusal")
# Other keys of OpenAI's answers, which are accepted if they are empty.
_ANSWER_KEYS = ("annotations", "audio", "function_call")
# That OpenAI's and litellm's clients have made of other keys of an answer, and send back.
_DERIVED_KEYS = ("parsed", "provider_specific_fields")
_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's, and what the templates call them
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[pb.ChatMessage]:
    """Converts a conversation.

    Raises:
      InvalidRequestError: A message has another form. The error names the message and its key.
    """
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _chat_message(message: Mapping[str, Any], place: str) -> pb.ChatMessage:
    if not isinstance(message, Mapping):
        raise _unlike(place, message, "a dictionary such as {'role': 'user', 'content': '...'}")
    for key, value in message.items():
        if key not in (*_KEYS, *_DERIVED_KEYS) and (value or key not in _ANSWER_KEYS):
            raise InvalidRequestError(f"{place}.{key}", f"cannot be served; allowed are {', '.join(_KEYS)}.")
    role = _text(message.get("role"), f"{place}.role")
    content = _content(message.get("content"), f"{place}.content")
    calls = message.get("tool_calls") or ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise _unlike(f"{place}.tool_calls", calls, "a list")
    key = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
    reasoning = message.get(key)
    return pb.ChatMessage(
        role=_ROLES.get(role, role),
        content=content or _content(message.get("refusal"), f"{place}.refusal"),
        reasoning_content=None if reasoning is None else _text(reasoning, f"{place}.{key}"),
        tool_calls=[_tool_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)],
    )


def _content(value: Any, place: str) -> str:
    """Returns the text of a content: text, a list of parts, which are joined by line breaks, or None."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return _text(value, place, "text or a list of parts")
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(value))


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _unlike(place, part, "a part such as {'type': 'text', 'text': '...'}")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{place}.type", f"is {kind!r}; allowed are {', '.join(_TEXT_PARTS)}, because the model reads text only."
        )
    return _text(part.get(_TEXT_PARTS[kind]), f"{place}.{_TEXT_PARTS[kind]}")


def _tool_call(call: Any, place: str) -> pb.ToolCall:
    """Converts a call: OpenAI's `{"id": ..., "type": "function", "function": {...}}`, or the function alone."""
    if not isinstance(call, Mapping):
        raise _unlike(place, call, "a dictionary such as {'type': 'function', 'function': {...}}")
    if (kind := call.get("type") or "function") != "function":
        raise InvalidRequestError(f"{place}.type", f"is {kind!r}; allowed is function.")
    function = call
    if "function" in call:
        function, place = call["function"], f"{place}.function"
    if not isinstance(function, Mapping) or "name" not in function:
        raise _unlike(place, function, "a function such as {'name': 'f', 'arguments': '{\"x\": 1}'}")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # OpenAI's models write no arguments as empty text.
    text = _text(arguments, f"{place}.arguments", "JSON text or a dictionary")
    return pb.ToolCall(name=_text(function["name"], f"{place}.name"), arguments=text if text.strip() else "{}")


def _text(value: Any, place: str, allowed: str = "text") -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _unlike(place, value, allowed)
    return value


def _unlike(place: str, value: Any, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(place, f"is {shown(value)}, of type {type(value).__name__}; allowed is {allowed}.")
