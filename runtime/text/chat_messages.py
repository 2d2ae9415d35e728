"""From a conversation to what a chat template is given. Serves step 2 of 10."""

import json
from collections.abc import Iterator
from typing import Any

from meshserve.protos import inference_pb2 as pb

from ..api.errors import InvalidRequestError

_MAX_ROLE_CHARS = 64
_MAX_TOOLS = 128  # and calls in a message

Messages = pb.Conversation | pb.ChatRequest  # the fields of the one are in the other, by the same names


def check_number(conversation: Messages, max_messages: int) -> None:
    """To be asked before anything that looks at each message: small ones come by the million.

    Raises:
      InvalidRequestError: there are too many messages, tools, or calls in one message.
    """
    _check_number("messages", len(conversation.messages), max_messages)
    _check_number("tools", len(conversation.tools))
    for index, message in enumerate(conversation.messages):
        _check_number(f"messages[{index}].tool_calls", len(message.tool_calls))


def texts(conversation: Messages) -> Iterator[str]:
    """Everything in it that may come to stand in the prompt."""
    yield from conversation.tools
    for message in conversation.messages:
        yield from (message.role, message.content, message.reasoning_content)
        yield from (text for call in message.tool_calls for text in (call.name, call.arguments))


def template_arguments(conversation: Messages) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, and the options of `Tokenizer.render_chat`.

    Raises:
      InvalidRequestError: something is missing or malformed, or what was sent contradicts itself.
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
                "add_generation_prompt", "is set, and continue_last_message, too; allowed is one of them."
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
            f"has {len(message.role)} characters; allowed is 1 to {_MAX_ROLE_CHARS}. Templates know system, user, "
            "assistant and tool.",
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
    """A template writes a message without its end only if there is something to cut the end off from."""
    if message.role != "assistant" or not message.content.strip() or message.tool_calls:
        raise InvalidRequestError(
            "continue_last_message",
            f"the last message is of {message.role!r}, with {len(message.content)} characters and "
            f"{len(message.tool_calls)} tool calls; allowed is one of the assistant with content and no calls.",
        )


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"is not JSON: {error}. Send a JSON object.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(field, f"is JSON of type {type(value).__name__}; allowed is an object.")
    return value
