"""Converts bodies of Anthropic's Messages API to the fields of a chat."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..api.errors import InvalidRequestError
from ..api.shown import shown
from .fields import COMMON, EXTENSIONS, Field, Kind, honoured, neutral, refused, required

# Keeping all of the reasoning is what happens anyway.
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

COUNT_TOKENS: dict[str, Field] = {
    "model": COMMON["model"],
    "messages": honoured(Kind.LIST, "of text, tool_use, tool_result and thinking blocks"),
    "system": honoured(Kind.TEXT_OR_LIST, "text, or text blocks"),
    "tools": honoured(Kind.LIST, "of the caller, with input_schema"),
    "tool_choice": honoured(Kind.OBJECT, "auto, any, tool, none; disable_parallel_tool_use"),
    "thinking": honoured(Kind.OBJECT, "enabled, with budget_tokens; adaptive; disabled, which is the default"),
    "output_config": honoured(Kind.OBJECT, "format; effort changes nothing"),
    "chat_template_kwargs": EXTENSIONS["chat_template_kwargs"],
    "cache_control": neutral("prompts are cached by their tokens; see cache_salt"),
    "context_management": refused("conversations are not edited", {"edits": []}, _KEEPS_ALL),
    "mcp_servers": refused("the server calls no tools"),
    "speed": refused("there is one speed", "standard"),
}
MESSAGES: dict[str, Field] = {
    **EXTENSIONS,
    **COUNT_TOKENS,
    "max_tokens": honoured(Kind.INTEGER),
    "stop_sequences": honoured(Kind.LIST),
    "stream": honoured(Kind.BOOLEAN),
    "temperature": honoured(Kind.NUMBER),
    "top_k": honoured(Kind.INTEGER),
    "top_p": honoured(Kind.NUMBER),
    "output_format": honoured(Kind.OBJECT, "older spelling of output_config.format"),
    "metadata": neutral("identifies an end user to Anthropic"),
    "service_tier": COMMON["service_tier"],
    "inference_geo": neutral("there is one place"),
    "container": refused("no code is run"),
}
# Keys of blocks and tools that change nothing here. Anthropic's client makes the last one, and sends it back.
_NEUTRAL_KEYS = frozenset({"cache_control", "citations", "caller", "parsed_output"})
_TOOL_KEYS = frozenset({"name", "description", "input_schema", "type", "strict", "eager_input_streaming"})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat that ask for the same as the fields of a message.

    Raises:
      InvalidRequestError: A message, a tool or an option has another form, or cannot be served.
    """
    own = ("stop_sequences", "system", "messages", "tools", "tool_choice", "thinking", "output_config", "output_format")
    chat = {name: value for name, value in fields.items() if name not in own}
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    chat["messages"] = [*_system(fields.get("system", "")), *_messages(required(fields, "messages"))]
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if "tools" in fields:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields["tools"])]
    chat |= _tool_choice(fields.get("tool_choice", {"type": "auto"}))
    chat |= _thinking(fields.get("thinking", {"type": "disabled"}), fields)
    config = fields.get("output_config", {})
    _check_keys(config, ("format", "effort"), "output_config")
    if (form := config.get("format") or fields.get("output_format")) is not None:
        chat["response_format"] = _format(form)
    return chat


def _system(system: Any) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": _texts(system, "system")}


def _messages(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    if not messages:
        raise InvalidRequestError("messages", "got none; send one or more.")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        _check_keys(message, ("role", "content"), place)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"{place}.role", f"got {shown(role, 40)}; allowed are user, assistant, system.")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif not isinstance(content, list):
            raise InvalidRequestError(f"{place}.content", f"got {shown(content)}; allowed is text or a list of blocks.")
        elif role == "assistant":
            yield _assistant(content, f"{place}.content")
        else:
            yield from _user(role, content, f"{place}.content")


def _assistant(blocks: Sequence[Any], place: str) -> dict[str, Any]:
    """Returns the message of what the model has said: its thoughts, its text and its calls."""
    thoughts, texts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        kind = _kind(block, at, {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": _TOOL_USE})
        if kind == "thinking":
            thoughts.append(_text(block, "thinking", at))
        elif kind == "text":
            texts.append({"type": "text", "text": _text(block, "text", at)})
        else:
            call_input = block.get("input", {})
            if not isinstance(call_input, dict):
                raise InvalidRequestError(f"{at}.input", f"got {shown(call_input)}; allowed is an object.")
            calls.append({"type": "function", "function": {"name": _text(block, "name", at), "arguments": call_input}})
    message: dict[str, Any] = {"role": "assistant", "content": texts, "tool_calls": calls}
    return message | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


_TOOL_USE = ("id", "name", "input")


def _user(role: str, blocks: Sequence[Any], place: str) -> Iterator[dict[str, Any]]:
    """Yields a message for each result of a tool, and one for each run of texts."""
    texts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        known: dict[str, Sequence[str]] = {"text": ("text",), "tool_result": ("tool_use_id", "content", "is_error")}
        if _kind(block, at, known) == "text":
            texts.append({"type": "text", "text": _text(block, "text", at)})
            continue
        if texts:
            yield {"role": role, "content": texts}
            texts = []
        result = _texts(block.get("content") or "", f"{at}.content")
        # Chat templates have no place for the flag.
        prefix = [{"type": "text", "text": "Error:"}] if block.get("is_error") else []
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": [*prefix, *result]}
    if texts:
        yield {"role": role, "content": texts}


def _texts(content: Any, place: str) -> list[dict[str, Any]]:
    """Returns the parts of a content that may be text only."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequestError(place, f"got {shown(content)}; allowed is text or a list of text blocks.")
    for index, block in enumerate(content):
        _kind(block, f"{place}[{index}]", {"text": ("text",)})
    return [{"type": "text", "text": _text(block, "text", f"{place}[{i}]")} for i, block in enumerate(content)]


def _kind(block: Any, place: str, known: Mapping[str, Sequence[str]]) -> str:
    """Returns the type of a block, of which the keys are known by type."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in known:
        allowed = ", ".join(known)
        raise InvalidRequestError(
            f"{place}.type", f"is {shown(kind, 40)}; allowed are {allowed}, because the model reads text only."
        )
    _check_keys(block, ("type", *known[kind]), place)
    return kind


def _text(block: Mapping[str, Any], key: str, place: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place}.{key}", f"got {shown(value)}; allowed is text.")
    return value


def _check_keys(value: Any, known: Sequence[str], place: str) -> None:
    """
    Raises:
      InvalidRequestError: The value is no object, or has a key that would be dropped.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(place, f"got {shown(value)}; allowed is an object.")
    for key, item in value.items():
        if key not in known and key not in _NEUTRAL_KEYS and item is not None:
            raise InvalidRequestError(f"{place}.{key}"[:120], f"cannot be served; allowed are {', '.join(known)}.")


def _tool(tool: Any, place: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise InvalidRequestError(f"{place}.type", f"is {shown(kind, 40)}; the server runs no tools. Send your own.")
    _check_keys(tool, sorted(_TOOL_KEYS), place)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{place}.input_schema", f"got {shown(schema)}; allowed is a JSON schema.")
    function = {"name": _text(tool, "name", place), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = _text(tool, "description", place)
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    _check_keys(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    kind = choice.get("type")
    if kind == "tool":
        found: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        found = _CHOICES[kind]
    else:
        raise InvalidRequestError("tool_choice.type", f"got {shown(kind, 40)}; allowed are auto, any, tool, none.")
    return {"tool_choice": found, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def _thinking(thinking: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    _check_keys(thinking, ("type", "budget_tokens", "display"), "thinking")
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if thinking.get("display") not in (None, "summarized"):
        raise InvalidRequestError("thinking.display", "cannot be served; allowed is summarized: thoughts are shown.")
    if kind == "disabled":
        return {} if "enable_thinking" in fields.get("chat_template_kwargs", {}) else {"enable_thinking": False}
    if kind == "adaptive" and budget is None:
        return {"enable_thinking": True}
    if kind != "enabled":
        raise InvalidRequestError("thinking.type", f"got {shown(kind, 40)}; allowed are enabled, adaptive, disabled.")
    most = fields.get("max_tokens", 1 << 20) - 1
    if type(budget) is not int or not 1 <= budget <= most:
        raise InvalidRequestError(
            "thinking.budget_tokens", f"got {shown(budget, 40)}; allowed is 1 to {most} (max_tokens)."
        )
    return {"enable_thinking": True, "thinking_token_budget": budget}


def _format(form: Any) -> dict[str, Any]:
    _check_keys(form, ("type", "schema"), "output_config.format")
    if form.get("type") != "json_schema":
        raise InvalidRequestError(
            "output_config.format.type", f"got {shown(form.get('type'), 40)}; allowed is json_schema."
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}
