"""Implements the InferenceService: checks requests, has the edge submit them, and writes their outputs.

In: gRPC requests. Out: streams of text. `edge` does what does not depend on gRPC, `retrieval_methods` has the methods
of embedding and reranking models, and `lifecycle` binds the ports and starts and stops the server.
"""

import dataclasses
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api import proto_codec
from ..api.errors import EngineStoppedError, InvalidRequestError
from ..api.request import Output
from ..api.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, SamplingParams
from ..api.tasks import GENERATE
from ..api.versions import installed_version
from .adapter_choice import chosen_adapter, usable_adapters
from .chat_answers import Prepared, prepared_chat
from .edge import Backend, CheckedRequest, Edge, checked_request_id, on_behalf_of
from .grpc_status import abort, answered
from .prompt_intake import Intake
from .retrieval_methods import RetrievalMethods

MAX_MESSAGE_BYTES = 16 * 2**20  # a prompt of a million tokens takes 3 MB


class InferenceService(pb_grpc.InferenceServiceServicer):
    """The InferenceService of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge
        self._retrieval = RetrievalMethods(edge)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async def prepare(_: Backend, intake: Intake, tenant: str, params: SamplingParams) -> Prepared:
            field = request.WhichOneof("prompt")
            if field is None:
                raise InvalidRequestError("prompt", "got neither text nor token_ids; send one of them.")
            if field == "token_ids":
                token_ids = intake.checked(field, request.token_ids.token_ids)
            else:
                token_ids = intake.checked(field, await intake.encode(request.text, tenant))
            return Prepared(token_ids, params, partial(proto_codec.answer, pb.GenerateResponse))

        await self._answer("Generate", request, prepare, context)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:
        async def prepare(backend: Backend, intake: Intake, tenant: str, params: SamplingParams) -> Prepared:
            return await prepared_chat(request, intake, backend.tokenizer, tenant, params)

        await self._answer("Chat", request, prepare, context)

    async def _answer(
        self,
        method: str,
        request: Any,
        prepare: Callable[[Backend, Intake, str, SamplingParams], Awaitable[Prepared]],
        context: Any,
    ) -> None:
        """Streams one request.

        Writes with `context.write` instead of `yield`, because a suspended generator learns of a caller's departure
        only when it is garbage-collected.
        """
        began = time.monotonic()
        try:
            backend, intake = self._edge.serving()
            backend.info.require(GENERATE)
            request_id = checked_request_id(request.request_id if request.HasField("request_id") else None)
            params = proto_codec.sampling_params(request.sampling, backend.info.default_sampling)
            tenant = self._edge.access.tenant(context.invocation_metadata())
            options = on_behalf_of(tenant, proto_codec.request_options(request, None))
            chosen_adapter(backend.engine.adapters, tenant, options)  # before the prompt is tokenised
            with self._edge.in_flight(method, request_id, tenant) as count_tokens:
                token_ids, params, message = await prepare(backend, intake, tenant.name, params)

                digests: list[str] = []  # of its adapter, until the first message has been sent

                async def write(output: Output) -> None:
                    response = message(output)
                    if digests:
                        response.adapter_digest = digests.pop()
                    await context.write(response)

                asked = CheckedRequest(
                    request_id, token_ids, params, options, began, tenant, count_tokens, digests.append
                )
                await self._edge.stream(method, asked, write, context)
        except Exception as error:  # CancelledError, of a cancelled call, is not an Exception
            await abort(context, error)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> None:
        await answered(self._retrieval.embed(request, context), context)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> None:
        await answered(self._retrieval.score(request, context), context)

    async def Rerank(self, request: pb.RerankRequest, context: Any) -> pb.RerankResponse:
        return await answered(self._retrieval.rerank(request, context), context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        try:
            _, intake = self._edge.serving()
            tenant = self._edge.access.tenant(context.invocation_metadata())
            with self._edge.in_flight("Tokenize", "", tenant):
                return await intake.tokenize(request, tenant.name)
        except Exception as error:
            await abort(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        try:
            _, intake = self._edge.serving()
            tenant = self._edge.access.tenant(context.invocation_metadata())
            with self._edge.in_flight("Detokenize", "", tenant):
                return pb.DetokenizeResponse(text=await intake.detokenize(request.token_ids, tenant.name))
        except Exception as error:
            await abort(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        try:
            tenant = self._edge.access.tenant(context.invocation_metadata())
            return pb.AbortResponse(num_aborted=self._edge.abort_requests(request.request_ids, tenant))
        except Exception as error:
            await abort(context, error)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        backend = await self._known_backend(context)
        try:
            tenant = self._edge.access.tenant(context.invocation_metadata())
            adapters = tuple(usable_adapters(backend.engine.adapters, tenant))
            return proto_codec.model_info_response(dataclasses.replace(backend.info, adapters=adapters))
        except Exception as error:
            await abort(context, error)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            state=self._edge.state,
            progress=self._edge.progress,
            uptime_seconds=time.monotonic() - self._edge.started,
            server_version=installed_version(),
            num_open_requests=self._edge.queues.num_open,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_chars=MAX_STOP_STRING_CHARS,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return proto_codec.load_response((await self._known_backend(context)).engine.load())

    async def _known_backend(self, context: Any) -> Backend:
        if self._edge.backend is None:
            await abort(context, EngineStoppedError(f"the server is starting ({self._edge.progress})"))
        return self._edge.backend
