"""Runs the requests of a call on the edge, and hands out their outputs: streamed, or all together."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import AbortedError, UnfinishedError
from ..api.request import FinishReason, Output, RequestOptions, TokenLogprobs, WeightSpan
from ..api.sampling_params import SamplingParams
from ..api.shown import shown
from ..api.tasks import GENERATE
from ..api.tenants import Tenant
from ..server.adapter_choice import is_usable, listed, usable_adapters
from ..server.edge import Backend, CheckedRequest, Edge, on_behalf_of
from ..server.prompt_intake import Intake
from .api_errors import HttpError
from .http_call import HttpCall

Write = Callable[[int, Output], Awaitable[None]]  # receives the index of the choice
Prompt = Callable[[Intake, str], Awaitable[tuple[int, ...]]]  # returns the tokens; receives the tenant's name


@dataclass
class Choice:
    """One sample of one prompt, as far as it has been generated."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    weight_spans: tuple[WeightSpan, ...] = ()

    def add(self, output: Output) -> None:
        """Adds an output."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.num_output_tokens = output.num_output_tokens or len(self.token_ids)  # the total comes last
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.num_prompt_tokens, self.num_cached_tokens = output.num_prompt_tokens, output.num_cached_tokens
            self.weight_spans = output.weight_spans


def shown_spans(spans: Sequence[WeightSpan]) -> list[dict[str, Any]]:
    """Returns which version of the weights computed how many tokens of a choice, for its last message."""
    return [{"version": span.version, "num_tokens": span.num_tokens} for span in spans]


class Generation:
    """A call of a caller who may use a model that generates.

    Args:
      method: For logs and metrics.
      edge: The edge.
      call: The call.
      model: The model or adapter that the body names; None if it names none.

    Raises:
      MeshserveError: The caller is not permitted, the queue is full, or the server is not serving the model.
    """

    def __init__(self, method: str, edge: Edge, call: HttpCall, model: str | None):
        self._method, self._edge, self._call = method, edge, call
        self.backend, self.intake = edge.serving()
        self.tenant: Tenant = edge.access.tenant(call.invocation_metadata())
        self._adapter = adapter_of(self.backend, self.tenant, model)
        self.backend.info.require(GENERATE)
        self.model = self._adapter or self.backend.info.name  # as answers call it

    async def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
        write: Write,
    ) -> list[tuple[int, ...]]:
        """Generates the samples of all prompts, and passes on their outputs as they come.

        Returns:
          The tokens of the prompts.

        Raises:
          MeshserveError: A prompt or a parameter is not valid, or a sample could not be finished. The others end.
        """
        if len(prompts) == 1:
            return [await self._one(self._call.request_id, 0, prompts[0], params, options, write)]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        self._one(f"{self._call.request_id}/{number}", number, prompt, params, options, write)
                    )
                    for number, prompt in enumerate(prompts)
                ]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    async def _one(
        self,
        request_id: str,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        write: Write,
    ) -> tuple[int, ...]:
        async def pass_on(output: Output) -> None:
            if output.finish_reason is FinishReason.CANCELLED:
                raise AbortedError(f"{request_id!r} was aborted")
            if output.finish_reason is FinishReason.ERROR:
                raise UnfinishedError(output.message)
            await write(number * options.n + output.index, output)

        with self._edge.in_flight(self._method, request_id, self.tenant) as count_tokens:
            token_ids = await prompt(self.intake, self.tenant.name)
            options = on_behalf_of(self.tenant, dataclasses.replace(options, adapter=self._adapter))
            asked = CheckedRequest(request_id, token_ids, params, options, self._call.began, self.tenant, count_tokens)
            await self._edge.stream(self._method, asked, pass_on, self._call)
        return token_ids


def adapter_of(backend: Backend, tenant: Tenant, model: str | None) -> str:
    """Returns the adapter that a body's model names; empty if it names the served model, or none.

    Raises:
      HttpError: The server serves nothing of this name, or not to this tenant.
    """
    names = backend.info.names
    if model is None or model in names:
        return ""
    catalog = backend.engine.adapters
    if is_usable(catalog, tenant, model):
        return model
    served = listed([names[0], *(info.name for info in usable_adapters(catalog, tenant))])
    raise HttpError(
        404,
        f"the model {shown(model, 200)} is not served here; this server has {served}. Ask for that, or for none.",
        code="model_not_found",
        field="model",
    )


def with_one_token(params: SamplingParams) -> SamplingParams:
    """Returns parameters with which the prompt's log-probabilities are computed, and as little as possible beside."""
    return dataclasses.replace(params, max_tokens=1, min_tokens=0)
