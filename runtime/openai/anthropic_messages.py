"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.request import FinishReason, Output
from ..server.edge import Edge
from ..text.answers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart
from .anthropic_request import COUNT_TOKENS, MESSAGES, chat_fields
from .api_errors import ErrorAnswer
from .chat_call import ChatCall, ChatChoice, conversation_of
from .event_stream import EventStream
from .fields import checked_body, required
from .generation import adapter_of
from .http_call import HttpCall

if TYPE_CHECKING:
    from aiohttp import web

_METHOD = "/v1/messages"
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(answer: ErrorAnswer) -> dict[str, Any]:
    """Returns an error in Anthropic's form."""
    kind = _ERRORS.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": answer.message}}


class AnthropicMessages:
    """The routes of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def answer(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/messages`: answers a conversation."""
        from aiohttp import web

        fields = checked_body(body, MESSAGES)
        required(fields, "max_tokens")
        asked = await call.apart.run(chat_fields, fields)
        chat = await call.apart.run(partial(ChatCall, names_stop=True), _METHOD, self._edge, asked, call)
        message = _Message(chat)
        headers = {"request-id": call.request_id}
        if not fields.get("stream"):

            async def keep(choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> None:
                for _ in message.events(choice, parts, output):
                    pass

            await chat.run(keep)
            return web.json_response(message.whole(), headers=headers)
        stream = EventStream(request, {**headers, "X-Request-Id": call.request_id}, anthropic_error)

        async def send(choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> None:
            for event in message.events(choice, parts, output):
                await stream.send(event, event["type"])

        try:
            await chat.run(send)
        except Exception as error:
            return await stream.fail(error, last="")
        return await stream.finish(last="")

    async def count_tokens(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/messages/count_tokens`: the number of tokens of a prompt."""
        from aiohttp import web

        fields = checked_body(body, COUNT_TOKENS)
        backend, intake = self._edge.serving()
        tenant = self._edge.access.tenant(call.invocation_metadata())
        adapter_of(backend, tenant, fields.get("model"))  # adapters have the tokenizer of their model
        asked = await call.apart.run(chat_fields, fields)
        conversation, variables = await call.apart.run(conversation_of, asked)
        with self._edge.in_flight("/v1/messages/count_tokens", call.request_id, tenant):
            rendered = await intake.rendered(conversation, tenant.name, variables)
        return web.json_response({"input_tokens": len(rendered.token_ids)})


class _Message:
    """An answer as a list of blocks, which grows by the events of a stream. A whole answer is made of the same."""

    def __init__(self, chat: ChatCall):
        self._chat = chat
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the last block, if that is a call
        self._has_begun = False

    def events(self, choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> Iterator[dict[str, Any]]:
        """Takes one output, and yields its events."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._shown([], None, self._first_usage())}
        for part in parts:
            yield from self._part(part)
        if output.finish_reason is not None:
            yield from self._end_block()
            delta = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stopped_by}
            yield {"type": "message_delta", "delta": delta, "usage": self._usage(choice)}
            yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        """Returns the answer, which has ended."""
        [choice] = self._chat.choices
        return self._shown(self._blocks, choice, self._usage(choice))

    def _part(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        if isinstance(part, ReasoningPart):
            yield from self._begin_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._blocks[-1]["thinking"] += part.text
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        elif isinstance(part, ContentPart):
            yield from self._begin_block("text", {"type": "text", "text": ""})
            self._blocks[-1]["text"] += part.text
            yield self._delta({"type": "text_delta", "text": part.text})
        elif isinstance(part, CallPart):
            call_id = f"toolu_{self._chat.request_id}_{part.index}"
            yield from self._begin_block("", {"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        else:
            assert isinstance(part, ArgumentsPart)
            self._arguments += part.text
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def _begin_block(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begins a block, unless the last one is of this kind and goes on."""
        if self._blocks and self._blocks[-1]["type"] == kind:
            return
        yield from self._end_block()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _end_block(self) -> Iterator[dict[str, Any]]:
        if self._blocks:
            if self._blocks[-1]["type"] == "tool_use":
                self._blocks[-1]["input"] = _parsed(self._arguments)
            self._arguments = ""
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _shown(self, blocks: list[dict[str, Any]], choice: ChatChoice | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._chat.request_id}", "type": "message", "role": "assistant", "model": self._chat.model,
            "content": blocks, "stop_reason": None if choice is None else _stop_reason(choice),
            "stop_sequence": None if choice is None else choice.stopped_by, "usage": usage,
        }  # fmt: skip

    def _first_usage(self) -> dict[str, Any]:
        """Returns the usage when the answer begins: how much of the prompt was cached is reported at its end."""
        return _usage(len(self._chat.prompt_ids), 0, 0)

    def _usage(self, choice: ChatChoice) -> dict[str, Any]:
        return _usage(choice.num_prompt_tokens, choice.num_cached_tokens, choice.num_output_tokens)


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens, "cache_read_input_tokens": num_cached_tokens,
        "cache_creation_input_tokens": 0, "output_tokens": num_output_tokens,
    }  # fmt: skip


def _stop_reason(choice: ChatChoice) -> str:
    if choice.finish_reason is not FinishReason.STOP:
        return "max_tokens"
    if choice.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if choice.calls else "end_turn"


def _parsed(arguments: str) -> Any:
    """Returns the arguments of a call; empty if they are cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
