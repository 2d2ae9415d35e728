"""Validates conversations and converts them to arguments of the chat template. Part of step 2 of 10."""

import json
from collections.abc import Iterator
from typing import Any

from meshserve.protos import inference_pb2 as pb

from ..api.errors import InvalidRequestError

_MAX_ROLE_CHARS = 64
_MAX_TOOLS = 128  # also the limit of tool calls per message
_MAX_JSON_CHARS = 262_144  # in a tool or a call's arguments; parsing this many holds Python's lock for 8 ms

Messages = pb.Conversation | pb.ChatRequest  # ChatRequest has the fields of Conversation under the same names


def check_number(conversation: Messages, max_messages: int) -> None:
    """Checks the number of messages, tools and tool calls.

    Must be called before any code that inspects each message: a request can contain millions of small messages.

    Raises:
      InvalidRequestError: There are too many messages, tools, or tool calls in one message.
    """
    _check_number("messages", len(conversation.messages), max_messages)
    _check_number("tools", len(conversation.tools))
    for index, message in enumerate(conversation.messages):
        _check_number(f"messages[{index}].tool_calls", len(message.tool_calls))


def texts(conversation: Messages) -> Iterator[str]:
    """Yields every text of the conversation that may appear in the prompt."""
    yield from conversation.tools
    for message in conversation.messages:
        yield from (message.role, message.content, message.reasoning_content)
        yield from (text for call in message.tool_calls for text in (call.name, call.arguments))


def template_arguments(conversation: Messages) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the messages and the keyword arguments for `Tokenizer.render_chat`.

    Raises:
      InvalidRequestError: A field is missing or malformed, or two options contradict each other.
    """
    if not conversation.messages:
        raise InvalidRequestError("messages", "got none; send one or more.")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(conversation.messages)]
    options: dict[str, Any] = {}
    if conversation.HasField("enable_thinking"):
        options["enable_thinking"] = conversation.enable_thinking
    if conversation.tools:
        options["tools"] = [_json_object(text, f"tools[{index}]") for index, text in enumerate(conversation.tools)]
    if conversation.continue_last_message:
        if conversation.add_generation_prompt:
            raise InvalidRequestError(
                "add_generation_prompt", "is set together with continue_last_message; allowed is one of them."
            )
        _check_continued(conversation.messages[-1])
        options |= {"continue_last_message": True, "add_generation_prompt": False}
    elif conversation.HasField("add_generation_prompt"):
        options["add_generation_prompt"] = conversation.add_generation_prompt
    return messages, options


def _message(message: pb.ChatMessage, place: str) -> dict[str, Any]:
    if not 1 <= len(message.role) <= _MAX_ROLE_CHARS:
        raise InvalidRequestError(
            f"{place}.role",
            f"has {len(message.role)} characters; allowed is 1 to {_MAX_ROLE_CHARS}. Chat templates know system, "
            "user, assistant and tool.",
        )
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.HasField("reasoning_content"):
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _tool_call(call: pb.ToolCall, place: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequestError(f"{place}.name", "is empty; send the name of the function.")
    function = {"name": call.name, "arguments": _json_object(call.arguments, f"{place}.arguments")}
    return {"type": "function", "function": function}


def _check_number(field: str, number: int, allowed: int = _MAX_TOOLS) -> None:
    if number > allowed:
        raise InvalidRequestError(field, f"got {number}; allowed are {allowed}.")


def _check_continued(message: pb.ChatMessage) -> None:
    """Checks that the last message can be continued: a template can leave its end open only if it has content."""
    if message.role != "assistant" or not message.content.strip() or message.tool_calls:
        raise InvalidRequestError(
            "continue_last_message",
            f"the last message has role {message.role!r}, {len(message.content)} characters and "
            f"{len(message.tool_calls)} tool calls; it must be an assistant message with content and no tool calls.",
        )


def _json_object(text: str, field: str) -> dict[str, Any]:
    if len(text) > _MAX_JSON_CHARS:
        raise InvalidRequestError(field, f"has {len(text)} characters; allowed are {_MAX_JSON_CHARS}. Shorten it.")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"is not JSON: {error}. Send a JSON object.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(field, f"is JSON of type {type(value).__name__}; allowed is an object.")
    return value
