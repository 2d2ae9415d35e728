"""Converts bodies of OpenAI's Responses API to the fields of a chat."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..api.errors import InvalidRequestError
from ..api.shown import shown
from .fields import COMMON, EXTENSIONS, Field, Kind, honoured, neutral, refused, required

RESPONSES: dict[str, Field] = COMMON | EXTENSIONS | {
    "input": honoured(Kind.TEXT_OR_LIST, "text, or items: message, reasoning, function_call, function_call_output"),
    "instructions": honoured(Kind.TEXT),
    "max_output_tokens": honoured(Kind.INTEGER),
    "temperature": honoured(Kind.NUMBER),
    "top_p": honoured(Kind.NUMBER),
    "top_k": honoured(Kind.INTEGER, "0 and -1 are off"),
    "stream": honoured(Kind.BOOLEAN),
    "tools": honoured(Kind.LIST, "functions"),
    "tool_choice": honoured(Kind.TEXT_OR_OBJECT, "none, auto, required, or a function"),
    "parallel_tool_calls": honoured(Kind.BOOLEAN),
    "text": honoured(Kind.OBJECT, "format: text, json_object, json_schema"),
    "reasoning": honoured(Kind.OBJECT, "effort: none turns thinking off; summary changes nothing: all is shown"),
    "thinking_token_budget": honoured(Kind.INTEGER, "most tokens of reasoning"),
    "include": honoured(Kind.LIST, "reasoning.encrypted_content changes nothing: reasoning is not encrypted"),
    "max_tokens": refused("use max_output_tokens"),
    "messages": refused("use input"),
    "stream_options": refused("a response always ends with its usage", {"include_obfuscation": False}),
    "previous_response_id": refused("nothing is stored; send the whole conversation as input"),
    "conversation": refused("nothing is stored; send the whole conversation as input"),
    "background": refused("nothing is stored", False),
    "prompt": refused("nothing is stored; send instructions and input"),
    "truncation": refused("a prompt is never cut; shorten it", "disabled"),
    "context_management": refused("conversations are not edited"),
    "max_tool_calls": refused("it limits built-in tools, of which there are none"),
    "top_logprobs": refused("use /v1/chat/completions", 0),
    "moderation": refused("nothing is moderated"),
    "prompt_cache_options": neutral("prompts are cached by their tokens; see cache_salt"),
}  # fmt: skip
_OWN = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include")
_INCLUDED = frozenset({"reasoning.encrypted_content"})
_TEXTS = ("input_text", "output_text", "text", "refusal")
_NEUTRAL_KEYS = frozenset({"type", "id", "status", "parsed_arguments"})  # the client makes the last, and sends it back
_ITEM_KEYS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content", "phase"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output"}),
}


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat that ask for the same as the fields of a response.

    Raises:
      InvalidRequestError: An item, a tool or an option has another form, or cannot be served.
    """
    chat = {name: value for name, value in fields.items() if name not in _OWN}
    given = required(fields, "input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    first = [{"role": "system", "content": fields["instructions"]}] if fields.get("instructions") else []
    chat["messages"] = [*first, *_messages(items)]
    if "max_output_tokens" in fields:
        chat["max_tokens"] = fields["max_output_tokens"]
    chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.get("tools", []))]
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    for name in fields.get("include", []):
        if not isinstance(name, str) or name not in _INCLUDED:
            raise InvalidRequestError("include", f"got {shown(name, 60)}; allowed is {', '.join(_INCLUDED)}.")
    return chat | _reasoning(fields.get("reasoning", {})) | _text_format(fields.get("text", {}))


def _messages(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yields the messages of a conversation. What the model has thought, said and called in a row is one message."""
    turn: dict[str, Any] = {}  # the model's, as far as it goes
    for index, item in enumerate(items):
        place = f"input[{index}]"
        kind = _kind(item, place)
        is_own = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        rank = {"reasoning": 0, "message": 1}.get(kind, 2)
        if turn and (not is_own or rank <= turn["rank"] < 2 or rank < turn["rank"]):
            yield turn["message"]
            turn = {}
        if not is_own:
            yield _other(item, kind, place)
            continue
        turn = turn or {"message": {"role": "assistant", "content": "", "tool_calls": []}}
        turn["rank"] = rank
        _add(turn["message"], item, kind, place)
    if turn:
        yield turn["message"]


def _kind(item: Any, place: str) -> str:
    """Returns the type of an item.

    Raises:
      InvalidRequestError: It is not served, or has a key that would be dropped.
    """
    if not isinstance(item, dict):
        raise InvalidRequestError(place, f"got {shown(item)}; allowed is an object.")
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEM_KEYS:
        raise InvalidRequestError(f"{place}.type", f"is {shown(kind, 40)}; allowed are {', '.join(_ITEM_KEYS)}.")
    for key, value in item.items():
        if key not in _ITEM_KEYS[kind] | _NEUTRAL_KEYS and value is not None:
            raise InvalidRequestError(f"{place}.{key}"[:120], f"cannot be served in an item of type {kind}.")
    return kind


def _add(message: dict[str, Any], item: Mapping[str, Any], kind: str, place: str) -> None:
    """Adds an item to the model's message."""
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise InvalidRequestError(f"{place}.encrypted_content", "is set; only reasoning as text can be read.")
        thoughts = item.get("content") or item.get("summary") or []
        message["reasoning_content"] = _joined(thoughts, f"{place}.content", ("reasoning_text", "summary_text"))
    elif kind == "message":
        message["content"] = _joined(item.get("content"), f"{place}.content", _TEXTS)
    else:
        function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
        message["tool_calls"].append({"type": "function", "function": function})


def _other(item: Mapping[str, Any], kind: str, place: str) -> dict[str, Any]:
    """Returns the message of an item that is not the model's."""
    if kind == "function_call_output":
        content = _joined(item.get("output"), f"{place}.output", _TEXTS)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        allowed = "user, assistant, system, developer"
        raise InvalidRequestError(f"{place}.role", f"got {shown(role, 40)}; allowed are {allowed}.")
    return {"role": role, "content": _joined(item.get("content"), f"{place}.content", _TEXTS)}


def _joined(content: Any, place: str, kinds: Sequence[str]) -> str:
    """Returns the text of a content: text, or parts of these kinds, which are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(place, f"got {shown(content)}; allowed is text or a list of parts.")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise InvalidRequestError(
                f"{place}[{index}].type",
                f"is {shown(kind, 40)}; allowed are {', '.join(kinds)}: the model reads text only.",
            )
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", f"{place}[{index}]"))
    return "\n".join(texts)


def _text(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{key}", f"got {shown(value)}; allowed is text.")
    return value


def _tool(tool: Any, place: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidRequestError(
            f"{place}.type", f"is {shown(kind, 40)}; allowed is function: the server runs no tools."
        )
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _reasoning(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in reasoning.items():
        if key not in ("effort", "summary", "generate_summary") and value is not None:
            raise InvalidRequestError(f"reasoning.{key}"[:80], "cannot be served; allowed are effort, summary.")
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _text_format(text: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in text.items():
        if key != "format" and value is not None and (key, value) != ("verbosity", "medium"):
            raise InvalidRequestError(f"text.{key}"[:80], f"got {shown(value, 40)}; allowed is format.")
    form = text.get("format")
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise InvalidRequestError("text.format", f"got {shown(form)}; allowed is an object.")
    if form.get("type") != "json_schema":
        return {"response_format": form}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
