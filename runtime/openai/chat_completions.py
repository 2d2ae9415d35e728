"""`POST /v1/chat/completions`: answers conversations, with reasoning and tool calls apart from the content."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..api.request import FinishReason, Output
from ..server.edge import Edge
from ..text.answers.answer_parts import AnswerPart, CallPart, ContentPart, ReasoningPart
from . import body_params, token_logprobs
from .chat_call import ChatCall, ChatChoice
from .event_stream import EventStream, as_json, quoted
from .fields import CHAT, checked_body
from .generation import shown_spans
from .http_call import HttpCall
from .whole_answers import answered

if TYPE_CHECKING:
    from aiohttp import web

_METHOD = "/v1/chat/completions"


class ChatCompletions:
    """The route of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def answer(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers a request. See `openai_port`."""
        fields = checked_body(body, CHAT)
        chat = await call.apart.run(ChatCall, _METHOD, self._edge, fields, call)
        answer = _ChatAnswer(chat, fields)
        if not fields.get("stream"):
            await chat.run()
            return await answered(call, answer.whole, is_long=answer.has_logprobs)
        stream = EventStream(request, {"X-Request-Id": call.request_id})

        async def send(choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> None:
            for chunk in answer.chunks(choice, parts, output):
                await stream.send(chunk)

        try:
            await chat.run(send)
            if answer.streams_usage:
                await stream.send(answer.message("chat.completion.chunk", []) | {"usage": chat.usage()})
        except Exception as error:
            return await stream.fail(error)
        return await stream.finish()


class _ChatAnswer:
    """The answer of a call in OpenAI's form, whole or in chunks.

    Args:
      chat: The call.
      fields: The fields that are set.

    Raises:
      InvalidRequestError: An option of the stream is not valid.
    """

    def __init__(self, chat: ChatCall, fields: Mapping[str, Any]):
        self._chat, self._fields = chat, fields
        self.streams_usage, self._always_usage = body_params.stream_options(fields)
        self._has_reasoning = fields.get("include_reasoning", True)
        self._has_ids = bool(fields.get("return_token_ids"))
        self._begun: set[int] = set()  # the choices of which something has been sent
        self._begin: str | None = None  # of every chunk

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities, of which there may be many."""
        return self._chat.num_logprobs is not None or "prompt_logprobs" in self._fields

    def chunks(self, choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> Iterator[dict[str, Any] | str]:
        """Yields the chunks of one output: one for each part, the last with the log-probabilities and the reason."""
        if len(parts) == 1 and choice.index in self._begun and (text := self._more_content(choice, parts[0], output)):
            yield text
            return
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        if is_first:
            deltas.insert(0, {"role": "assistant", "content": ""})
        is_end = output.finish_reason is not None
        if not deltas and (is_end or output.logprobs or (self._has_ids and output.token_ids)):
            deltas.append({})
        for number, delta in enumerate(deltas, 1):
            shown: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            if number == len(deltas):
                if output.logprobs and self._chat.num_logprobs is not None:
                    shown["logprobs"] = token_logprobs.chat_logprobs(self._chat.tokenizer, output.logprobs)
                if self._has_ids:
                    shown["token_ids"] = list(output.token_ids)
                if self._has_ids and is_end:
                    shown["weight_spans"] = shown_spans(output.weight_spans)
                shown["finish_reason"] = self._reason(choice) if is_end else None
            message = self.message("chat.completion.chunk", [shown])
            if is_first and self._has_ids:
                message["prompt_token_ids"] = list(self._chat.prompt_ids)
            if self._always_usage:
                message["usage"] = self._chat.usage()
            yield message

    def _more_content(self, choice: ChatChoice, part: AnswerPart, output: Output) -> str | None:
        """Returns the chunk of most outputs as JSON: more of the content and nothing else. None for all others."""
        has_more = output.finish_reason is not None or output.logprobs or self._has_ids or self._always_usage
        if has_more or not isinstance(part, ContentPart):
            return None
        if self._begin is None:
            self._begin = as_json(self.message("chat.completion.chunk", []))[: -len("]}")]
        return (
            f'{self._begin}{{"index":{choice.index},"delta":{{"content":{quoted(part.text)}}},"logprobs":null,'
            '"finish_reason":null}]}'
        )

    def _delta(self, part: AnswerPart) -> dict[str, Any] | None:
        if isinstance(part, ReasoningPart):
            return {"reasoning_content": part.text, "reasoning": part.text} if self._has_reasoning else None
        if isinstance(part, ContentPart):
            return {"content": part.text}
        call: dict[str, Any] = {"index": part.index, "function": {"arguments": ""}}
        if isinstance(part, CallPart):
            call |= {"id": self.call_id(part.index), "type": "function"}
            call["function"]["name"] = part.name
        else:
            call["function"]["arguments"] = part.text
        return {"tool_calls": [call]}

    def call_id(self, index: int) -> str:
        """Returns the id of a tool call of the answer."""
        return f"call_{self._chat.request_id}_{index}"

    def whole(self) -> dict[str, Any]:
        """Returns the answer, which has ended, as one message."""
        choices = []
        for choice in self._chat.choices:
            calls = [
                {
                    "id": self.call_id(index), "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(choice.calls)
            ]  # fmt: skip
            message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if calls else "")}
            message |= {"refusal": None, "annotations": []}
            if self._has_reasoning and choice.reasoning:
                message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
            if calls:
                message["tool_calls"] = calls
            shown: dict[str, Any] = {
                "index": choice.index, "message": message, "logprobs": None, "finish_reason": self._reason(choice),
            }  # fmt: skip
            if self._chat.num_logprobs is not None:
                shown["logprobs"] = token_logprobs.chat_logprobs(self._chat.tokenizer, choice.logprobs)
            if self._has_ids:
                shown |= {"token_ids": choice.token_ids, "weight_spans": shown_spans(choice.weight_spans)}
            choices.append(shown)
        answer = self.message("chat.completion", choices) | {"usage": self._chat.usage()}
        if "prompt_logprobs" in self._fields:
            found = self._chat.choices[0].prompt_logprobs
            answer["prompt_logprobs"] = token_logprobs.prompt_logprobs(self._chat.tokenizer, found)
        if self._has_ids:
            answer["prompt_token_ids"] = list(self._chat.prompt_ids)
        return answer

    def message(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a message, or a chunk of one, with these choices."""
        return {
            "id": f"chatcmpl-{self._chat.request_id}", "object": kind, "created": self._chat.created,
            "model": self._chat.model, "choices": choices,
        }  # fmt: skip

    def _reason(self, choice: ChatChoice) -> str:
        if choice.finish_reason is FinishReason.STOP:
            return "tool_calls" if choice.calls else "stop"
        return "length"
