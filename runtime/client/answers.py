"""Whole answers of conversations, divided into reasoning, content and tool calls. Does not import JAX."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from ..api.request import FinishReason
from ..text.answers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart
from .messages import CallError, Chunk, Usage


@dataclass(kw_only=True)
class ToolCall:
    """A call of a tool. `arguments` is a JSON object, unless the answer was cut off."""

    name: str
    arguments: str = ""

    def values(self) -> dict[str, Any]:
        """Returns the arguments.

        Raises:
          ValueError: They are cut off.
        """
        return json.loads(self.arguments)


@dataclass(kw_only=True)
class Answer:
    """An answer, or as much of it as has come."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def add(self, part: AnswerPart) -> None:
        """Adds a part."""
        if isinstance(part, ReasoningPart):
            self.reasoning += part.text
        elif isinstance(part, ContentPart):
            self.content += part.text
        elif isinstance(part, CallPart):
            self.tool_calls.append(ToolCall(name=part.name))
        elif isinstance(part, ArgumentsPart):
            self.tool_calls[part.index].arguments += part.text

    def message(self) -> dict[str, Any]:
        """Returns the message that stands for the answer in a conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
        return message


def answered(chunks: Iterable[Chunk], index: int = 0) -> Answer:
    """Returns the whole answer of a chat with `answer` set, or of the sample with this index.

        answer = answered(client.chat(messages, tools=tools, answer={}))

    Raises:
      CallError: The stream ended too early.
    """
    answer = Answer(tool_calls=[])
    for chunk in chunks:
        if chunk.index != index:
            continue
        for part in chunk.parts:
            answer.add(part)
        if chunk.finish is not None:
            answer.finish_reason, answer.usage = chunk.finish.reason, chunk.finish.usage
    if answer.finish_reason is None:
        raise CallError(grpc.StatusCode.INTERNAL, "the stream ended before its last message")
    return answer
