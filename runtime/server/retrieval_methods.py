"""Implements the methods Embed, Score and Rerank. Steps 1 and 10 of 10 for embedding and reranking models.

In: texts, or pairs of a query and a document. Out: embeddings or scores, streamed in groups as they are computed.

A call is divided into groups of texts, each of which is one request of the engine whose samples have prompts of their
own. A few groups of each call are open at the same time: enough to fill steps, and few enough for other callers to
find room in the queue.
"""

import asyncio
import base64
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.errors import AbortedError, InvalidRequestError, QueueFullError, UnfinishedError
from ..api.request import FinishReason, Output, RequestOptions
from ..api.tasks import EMBED, RERANK
from ..api.tenants import LOCAL
from ..program.pooled_rows import POOLING_PARAMS
from ..retrieval.prompt_formats import PromptFormat, checked_instruction, completed
from ..retrieval.results import EmbeddingForm, relevance
from .adapter_choice import chosen_adapter
from .edge import CheckedRequest, Edge, checked_request_id, on_behalf_of
from .prompt_intake import Intake

_MAX_INPUTS = 16_384
_GROUP_INPUTS = 64  # at most; a message has the results of a group
_OPEN_GROUPS = 8  # per call: 512 texts, half of the default queue

Tokens = tuple[int, ...]
# Receives the index of the first text of a group, and the outputs of its texts.
Write = Callable[[int, Sequence[Output]], Awaitable[None]]
Pool = Callable[[str, CheckedRequest, Sequence[Tokens], Any], Awaitable[list[Output]]]  # `RetrievalMethods.pool`


@dataclass(frozen=True)
class _Inputs:
    """The texts of a call."""

    num_chars: Sequence[int]  # in each text, for tokenization
    tokens: Callable[[int], Tokens]  # tokenises one by its index
    field: str  # the request's field, with {} for the index


class RetrievalMethods:
    """The methods of embedding and reranking models, to which the InferenceService and other fronts delegate.

    Their errors are those of `meshserve.runtime.api.errors`; a context is an `edge.Call` that also takes messages.
    """

    def __init__(self, edge: Edge):
        self._edge = edge

    async def embed(self, request: pb.EmbedRequest, context: Any) -> None:
        async def answer(intake: Intake, began: float) -> None:
            form = self._embedding_form(request)
            code = _encoder(request)

            async def write(first: int, outputs: Sequence[Output]) -> None:
                found = [code(form.embedding(_result(output)), _usage(output)) for output in outputs]
                for index, embedding in enumerate(found, first):
                    embedding.index = index
                await context.write(pb.EmbedResponse(embeddings=found))

            await self._answer_all("Embed", request, self._embedded(request, intake), write, context, began)

        await self._serve(EMBED, answer)

    async def score(self, request: pb.ScoreRequest, context: Any) -> None:
        async def answer(intake: Intake, began: float) -> None:
            async def write(first: int, outputs: Sequence[Output]) -> None:
                await context.write(pb.ScoreResponse(scores=_scores(first, outputs)))

            pairs = [(pair.query, pair.document) for pair in request.pairs]
            inputs = self._reranked(request, pairs, "pairs[{}]", intake)
            await self._answer_all("Score", request, inputs, write, context, began)

        await self._serve(RERANK, answer)

    async def rerank(self, request: pb.RerankRequest, context: Any) -> pb.RerankResponse:
        found: list[pb.RelevanceScore] = []

        async def answer(intake: Intake, began: float) -> None:
            if request.HasField("top_n") and not request.top_n:
                raise InvalidRequestError("top_n", "got 0; allowed is 1 or more. Omit it to get all documents.")

            async def write(first: int, outputs: Sequence[Output]) -> None:
                found.extend(_scores(first, outputs))

            pairs = [(request.query, document) for document in request.documents]
            inputs = self._reranked(request, pairs, "documents[{}]", intake)
            await self._answer_all("Rerank", request, inputs, write, context, began)

        await self._serve(RERANK, answer)
        found.sort(key=lambda result: (-result.score, result.index))
        return pb.RerankResponse(results=found[: request.top_n or len(found)])

    async def pool(
        self, method: str, asked: CheckedRequest, prompts: Sequence[tuple[int, ...]], context: Any
    ) -> list[Output]:
        """Submits prompts to a model with `ModelConfig.pooling`. Their call is counted by `in_flight`.

        Args:
          method: For logs and metrics.
          asked: The request; its `prompt_token_ids` are not used.
          prompts: What the results are computed for.
          context: The call's context.

        Returns:
          The last output of each prompt, which has its result.

        Raises:
          MeshserveError: Any error of `engine_api.EngineApi.submit_prompts` and `OutputQueue.take`.
          AbortedError: The caller has aborted the request.
        """
        backend, _ = self._edge.serving()  # tokenising may have taken a while
        outputs: dict[int, Output] = {}

        def submit(name: str, options: RequestOptions) -> None:
            backend.engine.submit_prompts(name, prompts, asked.params, options)

        counts = len(prompts), sum(map(len, prompts))
        with self._edge.submitted(method, asked, submit, counts, context) as accepted:
            while accepted.num_open_samples:
                output = await accepted.take()
                if output.finish_reason is FinishReason.CANCELLED:
                    raise AbortedError(f"{asked.request_id!r} was aborted")
                if output.finish_reason is FinishReason.ERROR:
                    raise UnfinishedError(output.message)
                outputs[output.index] = output
        self._edge.observer.metrics.num_pooled.inc(len(outputs))
        return [outputs[index] for index in range(len(prompts))]

    async def embed_tokens(self, method: str, request_id: str, token_ids: Sequence[int], context: Any) -> np.ndarray:
        """Returns the embedding of a text that a gateway has tokenised.

        The tokens that complete a text may be missing at its end.
        """
        began = time.monotonic()
        backend, intake = self._edge.serving()
        backend.info.require(EMBED)
        prompt = intake.checked("tokenized", completed(backend.tokenizer, tuple(token_ids)))
        with self._edge.in_flight(method, request_id, LOCAL) as count_tokens:
            count_tokens(len(prompt))
            options = on_behalf_of(LOCAL, RequestOptions())
            asked = CheckedRequest(request_id, (), POOLING_PARAMS, options, began, LOCAL, count_tokens)
            [output] = await self.pool(method, asked, [prompt], context)
        return backend.embedding.form(backend.info.embedding_dimensions).embedding(_result(output))

    async def _serve(self, task: str, answer: Callable[[Intake, float], Awaitable[None]]) -> None:
        """Answers a call if the server has this task."""
        began = time.monotonic()
        backend, intake = self._edge.serving()
        backend.info.require(task)
        await answer(intake, began)

    def _embedding_form(self, request: pb.EmbedRequest) -> EmbeddingForm:
        backend, _ = self._edge.serving()
        return backend.embedding.form(
            backend.info.embedding_dimensions,
            request.dimensions if request.HasField("dimensions") else None,
            request.normalize if request.HasField("normalize") else None,
        )

    def _embedded(self, request: pb.EmbedRequest, intake: Intake) -> _Inputs:
        prompts = self._format(request)

        def tokens(index: int) -> Tokens:
            item = request.inputs[index]
            kind = item.WhichOneof("content")
            if kind is None:
                raise InvalidRequestError(f"inputs[{index}]", "got neither text nor token_ids; send one of them.")
            if kind == "text":
                return prompts.embedded(item.text)
            if prompts.instruction:
                raise InvalidRequestError(
                    f"inputs[{index}].token_ids", "are given beside an instruction, which is only added to texts. "
                    "Tokenize the instruction with the text, or send the text.",
                )  # fmt: skip
            token_ids = tuple(item.token_ids.token_ids)
            return token_ids if prompts.max_tokens is None else token_ids[: prompts.max_tokens]

        num_chars = [len(item.text) for item in request.inputs]
        if not request.truncate:
            for index, size in enumerate(num_chars):
                intake.check_chars(f"inputs[{index}].text", size)
        return _Inputs(num_chars, tokens, "inputs[{}]")

    def _reranked(
        self, request: pb.ScoreRequest | pb.RerankRequest, pairs: Sequence[tuple[str, str]], field: str, intake: Intake
    ) -> _Inputs:
        prompts = self._format(request)
        num_chars = [len(query) + len(document) for query, document in pairs]
        for index, (query, document) in enumerate(pairs):
            intake.check_chars(field.format(index), len(query) if request.truncate else len(query) + len(document))
        return _Inputs(num_chars, lambda index: prompts.reranked(*pairs[index]), field)

    def _format(self, request: pb.EmbedRequest | pb.ScoreRequest | pb.RerankRequest) -> PromptFormat:
        backend, _ = self._edge.serving()
        max_tokens = backend.info.max_context_tokens - 1 if request.truncate else None
        prompt = "" if request.HasField("instruction") else backend.embedding.prompt
        return PromptFormat(backend.tokenizer, checked_instruction(request.instruction), max_tokens, prompt)

    async def _answer_all(
        self, method: str, request: Any, inputs: _Inputs, write: Write, context: Any, began: float
    ) -> None:
        """Computes the results of all texts of a call."""
        num_inputs = len(inputs.num_chars)
        if not 1 <= num_inputs <= _MAX_INPUTS:
            field = inputs.field.partition("[")[0]
            raise InvalidRequestError(field, f"got {num_inputs}; allowed are 1 to {_MAX_INPUTS}. Call several times.")
        request_id = checked_request_id(request.request_id if request.HasField("request_id") else None)
        tenant = self._edge.access.tenant(context.invocation_metadata())
        options = on_behalf_of(tenant, proto_codec.pooling_options(request))
        backend, _ = self._edge.serving()
        adapter = chosen_adapter(backend.engine.adapters, tenant, options)
        if adapter is not None:  # all groups have the same, or the call fails
            options = dataclasses.replace(options, adapter_digest=adapter.digest)
        with self._edge.in_flight(method, request_id, tenant) as count_tokens:
            asked = CheckedRequest(request_id, (), POOLING_PARAMS, options, began, tenant, count_tokens)
            call = _Call(self._edge, self.pool, method, asked, inputs, write, context)
            await call.answer()


class _Call:
    """The groups of one call."""

    def __init__(
        self, edge: Edge, pool: Pool, method: str, asked: CheckedRequest, inputs: _Inputs, write: Write, context: Any
    ):
        self._edge, self._pool, self._method, self._asked, self._inputs = edge, pool, method, asked, inputs
        self._write, self._context = write, context
        num_inputs, size = len(inputs.num_chars), min(_GROUP_INPUTS, edge.max_samples)
        self._groups = [range(first, min(first + size, num_inputs)) for first in range(0, num_inputs, size)]
        self._num_open = 0  # groups that the engine has accepted
        self._ended = asyncio.Event()  # set when the next group has ended
        self._writing = asyncio.Lock()

    async def answer(self) -> None:
        """Computes all groups, some at the same time. The first error ends the others."""
        waiting = iter(enumerate(self._groups))
        if len(self._groups) == 1:
            return await self._work(waiting)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(_OPEN_GROUPS, len(self._groups))):
                    tasks.create_task(self._work(waiting))
        except* Exception as errors:
            raise _first(errors) from None

    async def _work(self, waiting: Iterator[tuple[int, range]]) -> None:
        for number, group in waiting:
            outputs = await self._computed(number, await self._tokenised(group))
            async with self._writing:
                await self._write(group.start, outputs)

    async def _tokenised(self, group: range) -> list[Tokens]:
        _, intake = self._edge.serving()
        size = sum(self._inputs.num_chars[index] for index in group)
        prompts = await intake.convert(self._asked.tenant.name, size, lambda: [*map(self._inputs.tokens, group)])
        return [
            intake.checked(self._inputs.field.format(index), prompt)
            for index, prompt in zip(group, prompts, strict=True)
        ]

    async def _computed(self, number: int, prompts: Sequence[Tokens]) -> list[Output]:
        """Returns the outputs of a group. While the queue is full, it waits for other groups of this call to end."""
        asked = self._asked
        if number:
            asked = dataclasses.replace(asked, request_id=f"{asked.request_id}/{number}")
        asked.count_tokens(sum(map(len, prompts)))
        while True:
            ended = self._ended
            self._num_open += 1
            try:
                outputs = await self._pool(self._method, asked, prompts, self._context)
            except QueueFullError:
                if self._num_open == 1:
                    raise
            else:
                self._ended.set()
                self._ended = asyncio.Event()
                return outputs
            finally:
                self._num_open -= 1
            await ended.wait()


def _first(errors: BaseExceptionGroup) -> BaseException:
    """Returns the first exception of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _result(output: Output) -> np.ndarray:
    assert output.pooled is not None, output.request_id
    return output.pooled


def _usage(output: Output) -> dict[str, int]:
    return {"num_prompt_tokens": output.num_prompt_tokens, "num_cached_tokens": output.num_cached_tokens}


def _scores(first: int, outputs: Sequence[Output]) -> list[pb.RelevanceScore]:
    return [
        pb.RelevanceScore(index=index, score=relevance(_result(output)), **_usage(output))
        for index, output in enumerate(outputs, first)
    ]


def _encoder(request: pb.EmbedRequest) -> Callable[[np.ndarray, dict[str, int]], pb.Embedding]:
    """Returns the function that writes an embedding in the format of the request.

    Raises:
      InvalidRequestError: There is no such format.
    """
    formats: dict[int, Callable[[np.ndarray], dict[str, Any]]] = {
        pb.EMBEDDING_FORMAT_FLOATS: lambda vector: {"values": vector.tolist()},
        pb.EMBEDDING_FORMAT_FLOAT32: lambda vector: {"data": vector.astype("<f4").tobytes()},
        pb.EMBEDDING_FORMAT_BFLOAT16: lambda vector: {"data": vector.astype(ml_dtypes.bfloat16).tobytes()},
        pb.EMBEDDING_FORMAT_BASE64: lambda vector: {"base64": base64.b64encode(vector.astype("<f4").tobytes())},
    }
    kind = request.format if request.HasField("format") else pb.EMBEDDING_FORMAT_FLOATS
    if kind not in formats:
        names = ", ".join(pb.EmbeddingFormat.Name(number) for number in formats)
        raise InvalidRequestError("format", f"got {kind}; allowed are {names}.")
    content = formats[kind]
    return lambda vector, usage: pb.Embedding(**{**content(vector), **usage})
