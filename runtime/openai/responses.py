"""`POST /v1/responses`: OpenAI's Responses API, without what it stores."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..api.request import FinishReason, Output
from ..server.edge import Edge
from ..text.answers.answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart
from .api_errors import error_answer
from .chat_call import ChatCall, ChatChoice
from .event_stream import EventStream
from .fields import checked_body
from .http_call import HttpCall
from .responses_request import RESPONSES, chat_fields

if TYPE_CHECKING:
    from aiohttp import web

_METHOD = "/v1/responses"
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class Responses:
    """The route of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def answer(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers a request. See `openai_port`."""
        from aiohttp import web

        fields = checked_body(body, RESPONSES)
        asked = await call.apart.run(chat_fields, fields)
        chat = await call.apart.run(ChatCall, _METHOD, self._edge, asked, call)
        response = _Response(chat, fields)
        if not fields.get("stream"):

            async def keep(choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> None:
                for _ in response.events(choice, parts, output):
                    pass

            await chat.run(keep)
            return web.json_response(response.shown())
        stream = EventStream(request, {"X-Request-Id": call.request_id})

        async def send(choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> None:
            for event in response.events(choice, parts, output):
                await stream.send(event, event["type"])

        try:
            await chat.run(send)
        except Exception as error:
            if not stream.has_begun:
                raise
            event = response.failure(error)
            await stream.send(event, event["type"])
        return await stream.finish(last="")


class _Response:
    """An answer as a list of items, which grows by the events of a stream. A whole answer is made of the same."""

    def __init__(self, chat: ChatCall, fields: Mapping[str, Any]):
        self._chat, self._fields = chat, fields
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item may go on
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._num_events = 0

    def events(self, choice: ChatChoice, parts: Sequence[AnswerPart], output: Output) -> Iterator[dict[str, Any]]:
        """Takes one output, and yields its events."""
        if not self._num_events:
            yield self._event("response.created", response=self.shown())
            yield self._event("response.in_progress", response=self.shown())
        for part in parts:
            yield from self._part(part)
        if output.finish_reason is not None:
            self._status = "completed" if choice.finish_reason is FinishReason.STOP else "incomplete"
            yield from self._end_item(self._status)
            yield self._event(f"response.{self._status}", response=self.shown())

    def failure(self, error: Exception) -> dict[str, Any]:
        """Returns the last event of a stream that an error has ended."""
        answer = error_answer(error)
        self._status = "failed"
        self._error = {"code": answer.code or answer.kind, "message": answer.message}
        return self._event("response.failed", response=self.shown())

    def shown(self) -> dict[str, Any]:
        """Returns the response as far as it goes."""
        fields, params = self._fields, self._chat.params
        is_ended = self._status in ("completed", "incomplete")
        reasoning = {"effort": None, "summary": None, **fields.get("reasoning", {})}
        return {
            "id": f"resp_{self._chat.request_id}", "object": "response", "created_at": self._chat.created,
            "status": self._status, "background": False, "error": self._error, "model": self._chat.model,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "instructions": fields.get("instructions"), "max_output_tokens": fields.get("max_output_tokens"),
            "metadata": fields.get("metadata", {}), "output": [*self._items],
            "parallel_tool_calls": fields.get("parallel_tool_calls", True), "previous_response_id": None,
            "reasoning": reasoning, "store": False, "temperature": params.temperature, "top_p": params.top_p,
            "text": {"format": {"type": "text"}, **fields.get("text", {})},
            "tool_choice": fields.get("tool_choice", "auto"), "tools": fields.get("tools", []),
            "truncation": "disabled", "usage": self._usage() if is_ended else None, "user": fields.get("user"),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage()
        return {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip

    def _part(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        if isinstance(part, ReasoningPart):
            yield from self._more("reasoning", {"summary": [], "encrypted_content": None}, "reasoning_text", part.text)
        elif isinstance(part, ContentPart):
            yield from self._more("message", {"role": "assistant"}, "output_text", part.text)
        elif isinstance(part, CallPart):
            call = {"call_id": f"call_{self._chat.request_id}_{part.index}", "name": part.name, "arguments": ""}
            yield from self._begin_item("function_call", call)
        else:
            assert isinstance(part, ArgumentsPart)
            self._items[-1]["arguments"] += part.text
            yield self._item_event("response.function_call_arguments.delta", delta=part.text)

    def _more(self, kind: str, keys: dict[str, Any], part_kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Adds text to the last item, or to a new one if that is of another kind."""
        if not self._is_open or self._items[-1]["type"] != kind:
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            yield from self._begin_item(kind, {**keys, "content": []})
            self._items[-1]["content"].append(part)
            yield self._item_event("response.content_part.added", content_index=0, part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        yield self._item_event(f"response.{part_kind}.delta", delta=text, **self._text_keys())

    def _text_keys(self) -> dict[str, Any]:
        return {"content_index": 0} | ({"logprobs": []} if self._items[-1]["type"] == "message" else {})

    def _begin_item(self, kind: str, keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end_item("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item_id = f"{prefix}_{self._chat.request_id}_{len(self._items)}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **keys})
        self._is_open = True
        shown = {**self._items[-1], **({"content": []} if "content" in keys else {})}
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _end_item(self, status: str) -> Iterator[dict[str, Any]]:
        """Ends the last item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        done = f"response.{_DELTAS[item['type']]}.done"
        if item["type"] == "function_call":
            yield self._item_event(done, name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            yield self._item_event(done, text=part["text"], **self._text_keys())
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **keys: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **keys)

    def _event(self, kind: str, **keys: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **keys}
