"""What an answer to a conversation looks like: how it thinks and how it calls tools.

Nothing about a model is configured for this. The chat template says which tags the model writes, and the end of the
rendered prompt says whether the model is thinking when its answer begins.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THINK, END_OF_THINK = "<think>", "</think>"


class Thinking(enum.Enum):
    """Whether an answer begins with reasoning."""

    OPEN = "open"  # the prompt ends inside of it: Qwen3-Thinking-2507
    POSSIBLE = "possible"  # if it begins with `<think>`: Qwen3's hybrid models
    NONE = "none"  # the prompt has closed it (enable_thinking: false), or the template knows no reasoning


class CallForm(enum.Enum):
    """How a model writes tool calls."""

    JSON = "json"
    XML = "xml"


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """What to expect of an answer."""

    thinking: Thinking
    calls: CallForm | None  # None: the template knows no tool calls, or the caller has sent no tools
    parameters: Mapping[str, Mapping[str, Any]]  # by the name of a tool, the JSON schema of its parameters
    think_token_ids: tuple[int, int] | None = None  # of `<think>` and `</think>`; None if they are no tokens
    end_token_ids: tuple[int, ...] = ()  # that end an answer


def thinking_of(template: str, prompt: str) -> Thinking:
    """Returns whether the answer to a rendered prompt begins with reasoning.

    Args:
      template: The chat template.
      prompt: What it has rendered. Only its end counts: messages may contain the tags, too.
    """
    if END_OF_THINK not in template:
        return Thinking.NONE
    end = prompt.rstrip()
    if end.endswith(THINK):
        return Thinking.OPEN
    return Thinking.NONE if end.endswith(END_OF_THINK) else Thinking.POSSIBLE


def call_form_of(template: str) -> CallForm | None:
    """Returns how a model with this chat template writes tool calls; None if the template does not show it."""
    if "<tool_call>" not in template:
        return None
    return CallForm.XML if "<function=" in template else CallForm.JSON


def answer_format(template: str, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerFormat:
    """Returns what to expect of the answer to a rendered prompt with these tools, in OpenAI's form."""
    functions = [tool.get("function", tool) for tool in tools]
    return AnswerFormat(
        thinking=thinking_of(template, prompt),
        calls=call_form_of(template) if tools else None,
        parameters={
            function["name"]: function.get("parameters") or {}
            for function in functions
            if isinstance(function, Mapping) and isinstance(function.get("name"), str)
        },
    )
