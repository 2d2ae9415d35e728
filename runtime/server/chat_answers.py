"""Prepares a Chat request, and turns its outputs into messages: as text, or divided into reasoning, content and calls.

The parser and the rules are those of OpenAI's API; see `text/answers`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.errors import InvalidRequestError
from ..api.request import Output
from ..api.sampling_params import SamplingParams
from ..text.answers.answer_format import AnswerFormat
from ..text.answers.answer_grammar import ToolChoice, answer_constraint
from ..text.answers.answer_reader import AnswerReader
from ..text.answers.part_messages import part_message
from ..text.tokenizer import Tokenizer, text_stream
from .prompt_intake import Intake


class Prepared(NamedTuple):
    """A request whose prompt is known, and how its outputs become messages."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    message: Callable[[Output], proto_codec.AnswerMessage]


async def prepared_chat(
    request: pb.ChatRequest, intake: Intake, tokenizer: Tokenizer, tenant: str, params: SamplingParams
) -> Prepared:
    """Renders a conversation, and adds to the parameters what the options of its answer ask for.

    Raises:
      InvalidRequestError: The conversation or an option is not valid.
      UnsupportedModelError: The model has no chat template.
      QuotaExceededError, QueueFullError: Too many prompts are being rendered.
    """
    resumed = _resumed(request, intake, params)
    chat = await intake.rendered(request, tenant)
    token_ids = intake.checked("messages", chat.token_ids + resumed)
    intake.check_params(params, len(token_ids))
    if not request.HasField("answer"):
        return Prepared(token_ids, params, partial(proto_codec.answer, pb.ChatResponse))
    options = request.answer
    budget = options.thinking_token_budget if options.HasField("thinking_token_budget") else None
    constraint = answer_constraint(
        chat.form, params.constraint, _tool_choice(options, chat.form), max_thinking_tokens=budget, place="answer."
    )
    resumed, said = token_ids[len(token_ids) - params.num_resumed_tokens :], ""
    if resumed:
        said = await intake.convert(tenant, len(resumed), _text_of, tokenizer, params, resumed)
    is_parallel = not options.HasField("parallel_tool_calls") or options.parallel_tool_calls
    answers = _DividedAnswers(chat.form, is_parallel, said, resumed)
    return Prepared(token_ids, dataclasses.replace(params, constraint=constraint), answers.message)


def _resumed(request: pb.ChatRequest, intake: Intake, params: SamplingParams) -> tuple[int, ...]:
    if not request.resumed_token_ids:
        return ()
    if len(request.resumed_token_ids) != params.num_resumed_tokens:
        message = f"has {len(request.resumed_token_ids)} tokens; sampling.num_resumed_tokens must be their number."
        raise InvalidRequestError("resumed_token_ids", message)
    return intake.checked("resumed_token_ids", request.resumed_token_ids)


def _tool_choice(options: pb.AnswerOptions, form: AnswerFormat) -> ToolChoice | None:
    kind = options.WhichOneof("tool_choice")
    if kind is None:
        return None
    if kind == "any_tool":
        if not options.any_tool:
            raise InvalidRequestError("answer.any_tool", "got false; set it to true, or omit it.")
        if not form.parameters:
            raise InvalidRequestError("answer.any_tool", "is set, but tools has no function with a name.")
        return ToolChoice(form.parameters)
    if options.tool not in form.parameters:
        allowed = ", ".join(form.parameters) or "none, as tools is empty"
        raise InvalidRequestError("answer.tool", f"got {options.tool[:80]!r}; allowed is a tool's name: {allowed}.")
    return ToolChoice({options.tool: form.parameters[options.tool]})


def _text_of(tokenizer: Tokenizer, params: SamplingParams, token_ids: Sequence[int]) -> str:
    """Returns the text that had been sent when these tokens had been sent."""
    return text_stream(tokenizer, params).push(token_ids)[0]


class _DividedAnswers:
    """The samples of one request.

    Args:
      form: What to expect.
      is_parallel: See `AnswerReader`.
      said: The text of the resumed tokens. The parts that it has completed are not sent again.
      resumed: These tokens.
    """

    def __init__(self, form: AnswerFormat, is_parallel: bool, said: str, resumed: tuple[int, ...]):
        self._form, self._is_parallel, self._said, self._resumed = form, is_parallel, said, resumed
        self._readers: dict[int, AnswerReader] = {}

    def message(self, output: Output) -> pb.ChatResponse:
        """Returns the message of one output."""
        reader = self._readers.get(output.index)
        if reader is None:
            reader = self._readers[output.index] = AnswerReader(self._form, is_parallel=self._is_parallel)
            if self._resumed:
                reader.push(self._said, self._resumed, is_end=False)
        is_end = output.finish_reason is not None
        parts = reader.push(output.text, output.token_ids, is_end=is_end)
        response = proto_codec.answer(pb.ChatResponse, output)
        response.ClearField("text")
        response.parts.extend(map(part_message, parts))
        if is_end:
            response.finish.usage.num_reasoning_tokens = reader.num_reasoning_tokens
        return response
