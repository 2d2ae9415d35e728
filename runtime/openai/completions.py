"""`POST /v1/completions`: continues prompts, given as text or as tokens."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..api.errors import InvalidRequestError
from ..api.request import FinishReason, Output
from ..api.shown import shown
from ..server.edge import Edge
from ..server.prompt_intake import Intake
from . import body_params, token_logprobs
from .event_stream import EventStream, as_json, quoted
from .fields import COMPLETIONS, checked_body, required, whole_numbers
from .generation import Choice, Generation, Prompt, shown_spans, with_one_token
from .http_call import HttpCall
from .usage import usage_of
from .whole_answers import answered

if TYPE_CHECKING:
    from aiohttp import web

_MAX_PROMPTS = 1_024
_METHOD = "/v1/completions"
_NOTHING_ELSE = '"logprobs":null,"finish_reason":null}]}'


class Completions:
    """The route of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def answer(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers a request. See `openai_port`."""
        fields = checked_body(body, COMPLETIONS)
        completion = await call.apart.run(_Completion, self._edge, fields, call)
        return await completion.answer(request)


class _Completion:
    """One request."""

    def __init__(self, edge: Edge, fields: Mapping[str, Any], call: HttpCall):
        self._generation = Generation(_METHOD, edge, call, fields.get("model"))
        self._tokenizer, info = self._generation.backend.tokenizer, self._generation.backend.info
        self._fields, self._call = fields, call
        self._logprobs: int | None = fields.get("logprobs")
        self._has_echo = bool(fields.get("echo"))
        # Harnesses that score texts ask for no tokens of their own.
        self._is_scoring = self._has_echo and fields.get("max_tokens") == 0
        wanted = {**fields}
        if self._is_scoring:
            del wanted["max_tokens"]
        if self._has_echo and self._logprobs is not None:
            wanted["prompt_logprobs"] = self._logprobs
        self._params = body_params.sampling_params(
            wanted, info.default_sampling, logprobs=self._logprobs, constraint=body_params.constraint_of(fields)
        )
        if self._is_scoring:
            self._params = with_one_token(self._params)
        self._options = body_params.request_options(fields)
        self._streams_usage, self._always_usage = body_params.stream_options(fields)
        self._has_ids = bool(fields.get("return_token_ids"))
        self._has_more = self._has_ids or self._always_usage or self._logprobs is not None  # in every chunk
        self._model, self._created = self._generation.model, int(time.time())
        self._prompts = list(_prompts(required(fields, "prompt")))
        self._prompt_ids: dict[int, tuple[int, ...]] = {}
        num_choices = len(self._prompts) * self._options.n
        self._choices = [Choice(index) for index in range(num_choices)]

    async def answer(self, request: "web.Request") -> "web.StreamResponse":
        prompts = [self._known(number, prompt) for number, prompt in enumerate(self._prompts)]
        if self._fields.get("stream"):
            return await self._stream(request, prompts)

        async def keep(index: int, output: Output) -> None:
            self._choices[index].add(output)

        await self._generation.run(prompts, self._params, self._options, keep)
        has_logprobs = self._logprobs is not None or "prompt_logprobs" in self._fields
        return await answered(self._call, self._answer, is_long=has_logprobs)

    def _answer(self) -> dict[str, Any]:
        choices = [self._whole(choice) for choice in self._choices]
        return self._message(choices) | {"usage": usage_of(self._choices, self._options.n)}

    def _known(self, number: int, prompt: Prompt) -> Prompt:
        async def tokens(intake: Intake, tenant: str) -> tuple[int, ...]:
            token_ids = self._prompt_ids[number] = await prompt(intake, tenant)
            for choice in self._choices[number * self._options.n :][: self._options.n]:
                choice.num_prompt_tokens = len(token_ids)
            return token_ids

        return tokens

    async def _stream(self, request: "web.Request", prompts: Sequence[Prompt]) -> "web.StreamResponse":
        stream = EventStream(request, {"X-Request-Id": self._call.request_id})
        begin = as_json(self._message([]))[: -len("]}")]  # of every chunk

        async def send(index: int, output: Output) -> None:
            choice = self._choices[index]
            before = len(choice.text)
            echoed = self._echoed(index) if self._has_echo and not choice.token_ids and not before else ""
            choice.add(output)
            if not (echoed or output.finish_reason is not None or self._has_more):
                await stream.send(f'{begin}{{"index":{index},"text":{quoted(output.text)},{_NOTHING_ELSE}')
                return
            shown = self._shown(index, echoed + output.text, output, len(echoed) + before)
            message = self._message([shown])
            if self._always_usage:
                message["usage"] = usage_of(self._choices, self._options.n)
            await stream.send(message)

        try:
            await self._generation.run(prompts, self._params, self._options, send)
            if self._streams_usage:
                await stream.send(self._message([]) | {"usage": usage_of(self._choices, self._options.n)})
        except Exception as error:
            return await stream.fail(error)
        return await stream.finish()

    def _shown(self, index: int, text: str, output: Output, offset: int) -> dict[str, Any]:
        """Returns a choice of a streamed message."""
        shown: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": _reason(output)}
        if self._logprobs is not None:
            shown["logprobs"] = token_logprobs.completion_logprobs(self._tokenizer, output.logprobs, offset)
        if self._has_ids:
            shown["token_ids"] = list(output.token_ids)
            if output.finish_reason is not None:
                shown["weight_spans"] = shown_spans(output.weight_spans)
        return shown

    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Returns a choice of an answer that is not streamed."""
        prompt_ids = self._prompt_ids[choice.index // self._options.n]
        echoed = self._echoed(choice.index) if self._has_echo else ""
        text = echoed if self._is_scoring else echoed + choice.text
        whole: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None}
        whole["finish_reason"] = "length" if self._is_scoring else _name(choice.finish_reason)
        prompt = self._choices[choice.index - choice.index % self._options.n].prompt_logprobs
        if self._logprobs is not None:
            found = [*(prompt if self._has_echo else ()), *(() if self._is_scoring else choice.logprobs)]
            first = prompt_ids[0] if self._has_echo else None
            whole["logprobs"] = token_logprobs.completion_logprobs(self._tokenizer, found, 0, first)
        if "prompt_logprobs" in self._fields:
            whole["prompt_logprobs"] = token_logprobs.prompt_logprobs(self._tokenizer, prompt)
        if self._has_ids:
            whole |= {"prompt_token_ids": list(prompt_ids), "token_ids": choice.token_ids}
            whole["weight_spans"] = shown_spans(choice.weight_spans)
        return whole

    def _echoed(self, index: int) -> str:
        return self._tokenizer.decode(self._prompt_ids[index // self._options.n])

    def _message(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._call.request_id}", "object": "text_completion", "created": self._created,
            "model": self._model, "choices": choices,
        }  # fmt: skip


def _prompts(value: Any) -> Sequence[Prompt]:
    """Returns the prompts of a body: one text, one list of tokens, or a list of either."""
    if isinstance(value, str) or (value and type(value[0]) is int):
        value = [value]
    if not 1 <= len(value) <= _MAX_PROMPTS:
        raise InvalidRequestError("prompt", f"got {len(value)} prompts; allowed are 1 to {_MAX_PROMPTS}.")
    return [_prompt(f"prompt[{index}]" if len(value) > 1 else "prompt", item) for index, item in enumerate(value)]


def _prompt(field: str, value: Any) -> Prompt:
    async def of_text(intake: Intake, tenant: str) -> tuple[int, ...]:
        return intake.checked(field, await intake.encode(value, tenant))

    async def of_tokens(intake: Intake, tenant: str) -> tuple[int, ...]:
        return intake.checked(field, token_ids)

    if isinstance(value, str):
        return of_text
    if not isinstance(value, list):
        raise InvalidRequestError(field, f"got {shown(value, 40)}; allowed is text or a list of token ids.")
    token_ids = whole_numbers(field, value)
    return of_tokens


def _reason(output: Output) -> str | None:
    return None if output.finish_reason is None else _name(output.finish_reason)


def _name(reason: FinishReason | None) -> str:
    return "stop" if reason is FinishReason.STOP else "length"
