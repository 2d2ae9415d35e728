"""Answers a conversation for any route whose requests are conversations."""

import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from meshserve.protos import inference_pb2 as pb

from ..api.errors import InvalidRequestError
from ..api.request import FinishReason, Output
from ..api.shown import shown
from ..server.edge import Edge
from ..server.prompt_intake import Intake, RenderedChat
from ..text.answers.answer_format import Thinking
from ..text.answers.answer_grammar import ToolChoice, answer_constraint
from ..text.answers.answer_parts import AnswerPart, CallPart, ContentPart, ReasoningPart
from ..text.answers.answer_reader import AnswerReader
from ..text.openai_messages import chat_messages
from . import body_params
from .fields import required
from .generation import Choice, Generation
from .http_call import HttpCall
from .usage import usage_of

_MAX_TOP_LOGPROBS = 20
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclasses.dataclass
class ChatChoice(Choice):
    """One sample of an answer, divided into its parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = dataclasses.field(default_factory=list)  # each a name and its arguments so far
    reader: AnswerReader | None = None
    stopped_by: str | None = None  # the stop string that has ended it; see `ChatCall`

    def take(self, part: AnswerPart) -> None:
        """Adds a part of the answer."""
        if isinstance(part, ReasoningPart):
            self.reasoning += part.text
        elif isinstance(part, ContentPart):
            self.content += part.text
        elif isinstance(part, CallPart):
            self.calls.append([part.name, ""])
        else:
            self.calls[part.index][1] += part.text


# Receives the choice to which an output belongs, the parts that have become certain with it, and the output.
OnParts = Callable[[ChatChoice, Sequence[AnswerPart], Output], Awaitable[None]]


class ChatCall:
    """One conversation that is answered.

    Args:
      method: For logs and metrics.
      edge: The edge.
      fields: The fields that are set, as `/v1/chat/completions` calls them.
      call: The call.
      names_stop: Whether `ChatChoice.stopped_by` is found.

    Raises:
      MeshserveError: A field is not valid, or the caller cannot be served.
    """

    def __init__(self, method: str, edge: Edge, fields: Mapping[str, Any], call: HttpCall, *, names_stop: bool = False):
        self._generation = Generation(method, edge, call, fields.get("model"))
        self.tokenizer, info = self._generation.backend.tokenizer, self._generation.backend.info
        self._fields, self.request_id = fields, call.request_id
        self._options = body_params.request_options(fields)
        self.model, self.created = self._generation.model, int(time.time())
        self._conversation, self._variables = conversation_of(fields)
        self._tool_choice = tool_choice_of(fields)
        self._constraint = body_params.constraint_of(fields)
        self.num_logprobs = _num_logprobs(fields)
        self._is_divided = fields.get("separate_reasoning", True)
        self.prompt_ids: tuple[int, ...] = ()
        self.choices = [ChatChoice(index) for index in range(self._options.n)]
        self.params = body_params.sampling_params(
            fields, info.default_sampling, logprobs=self.num_logprobs, constraint=self._constraint
        )
        self._named_stops = sorted(self.params.stop, key=len, reverse=True) if names_stop else []
        if self._named_stops:
            self.params = dataclasses.replace(self.params, include_stop=True)

    async def run(self, on_parts: OnParts | None = None) -> None:
        """Generates the answer. Its choices then have all parts; each output's are passed on to `on_parts`, if given.

        Raises:
          MeshserveError: The conversation is not valid, or the answer could not be finished.
        """
        chat: RenderedChat = await self._generation.intake.rendered(
            self._conversation, self._generation.tenant.name, self._variables
        )
        self.prompt_ids = chat.token_ids
        shown = chat.form if self._is_divided else dataclasses.replace(chat.form, thinking=Thinking.NONE)
        is_parallel = self._fields.get("parallel_tool_calls", True)
        for choice in self.choices:
            choice.reader = AnswerReader(shown, is_parallel=is_parallel)
            choice.num_prompt_tokens = len(chat.token_ids)
        budget = self._fields.get("thinking_token_budget")
        constraint = answer_constraint(chat.form, self._constraint, self._tool_choice, max_thinking_tokens=budget)
        params = dataclasses.replace(self.params, constraint=constraint)

        async def prompt(intake: Intake, tenant: str) -> tuple[int, ...]:
            return intake.checked("messages", chat.token_ids)

        async def write(index: int, output: Output) -> None:
            choice = self.choices[index]
            parts = self._divided(choice, output)
            if on_parts is not None:
                await on_parts(choice, parts, output)

        await self._generation.run([prompt], params, self._options, write)

    def usage(self) -> dict[str, Any]:
        """Returns what the answer has taken so far, in OpenAI's form."""
        readers = [choice.reader for choice in self.choices if choice.reader is not None]
        num_reasoning_tokens = sum(reader.num_reasoning_tokens for reader in readers)
        return usage_of(self.choices, self._options.n, num_reasoning_tokens)

    def _divided(self, choice: ChatChoice, output: Output) -> list[AnswerPart]:
        assert choice.reader is not None
        choice.add(output)
        text, is_end = self._without_stop(choice, output), output.finish_reason is not None
        parts = choice.reader.push(text, output.token_ids, is_end=is_end)
        for part in parts:
            choice.take(part)
        return parts

    def _without_stop(self, choice: ChatChoice, output: Output) -> str:
        """Returns the text of an output without the stop string that ends it, and notes that in the choice."""
        if output.finish_reason is FinishReason.STOP:
            choice.stopped_by = next(filter(output.text.endswith, self._named_stops), None)
        return output.text.removesuffix(choice.stopped_by or "")


def conversation_of(fields: Mapping[str, Any]) -> tuple[pb.Conversation, dict[str, Any]]:
    """Returns the conversation of a body, and the variables of the chat template beside it.

    Raises:
      InvalidRequestError: A message, a tool or an option has another form.
    """
    variables = dict(fields.get("chat_template_kwargs", {}))
    effort = fields.get("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequestError("reasoning_effort", f"got {shown(effort, 40)}; allowed are {', '.join(_EFFORTS)}.")
    enable_thinking = fields.get("enable_thinking", variables.pop("enable_thinking", None))
    if enable_thinking is None and effort is not None:
        enable_thinking = effort != "none"
    has_tools = fields.get("tool_choice", "auto") != "none"
    conversation = pb.Conversation(
        messages=chat_messages(required(fields, "messages")),
        tools=[json.dumps(tool, ensure_ascii=False) for tool in checked_tools(fields)] if has_tools else (),
        continue_last_message=fields.get("continue_final_message", False),
    )
    if enable_thinking is not None:
        conversation.enable_thinking = bool(enable_thinking)
    if "add_generation_prompt" in fields:
        conversation.add_generation_prompt = fields["add_generation_prompt"]
    return conversation, variables


def checked_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools of a body.

    Raises:
      InvalidRequestError: A tool is no function with a name.
    """
    tools = fields.get("tools", [])
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise InvalidRequestError(f"tools[{index}].type", "is no function; other tools are not served.")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"tools[{index}].function.name", "is missing.")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise InvalidRequestError(f"tools[{index}].function.parameters", "is no JSON schema.")
    return tools


def tool_choice_of(fields: Mapping[str, Any]) -> ToolChoice | None:
    """Returns the functions of which the answer must call one; None if it need not.

    Raises:
      InvalidRequestError: There is no such function.
    """
    choice, tools = fields.get("tool_choice", "auto"), checked_tools(fields)
    if choice in ("auto", "none"):
        return None
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if choice == "required":
        if not functions:
            raise InvalidRequestError("tool_choice", "is required, but there are no tools.")
        return ToolChoice(functions)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in functions:
        allowed = f"none, auto, required, or one of {', '.join(functions) or 'no tools'}"
        raise InvalidRequestError("tool_choice", f"got {shown(choice)}; allowed is {allowed}.")
    return ToolChoice({name: functions[name]})


def _num_logprobs(fields: Mapping[str, Any]) -> int | None:
    top = fields.get("top_logprobs")
    if not fields.get("logprobs"):
        if top:
            raise InvalidRequestError("top_logprobs", "is set, but logprobs is not.")
        return None
    if top is not None and not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise InvalidRequestError("top_logprobs", f"got {top}; allowed is 0 to {_MAX_TOP_LOGPROBS}.")
    return top or 0
