"""Synchronous and asyncio Python clients of a meshserve server. Does not import JAX.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("The sea", max_tokens=64, temperature=0.0):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. The first call waits until the server is ready (see `readiness`). A
failed call raises `CallError`, which carries the status code and the server's hints. Arguments that cannot be sent
raise ValueError or TypeError before the call starts. Leaving the loop over `generate` early cancels the request as soon
as the generator is garbage collected; calling its `close` method cancels it immediately.
"""

import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from typing import Any, Unpack

import grpc
import numpy as np
from grpc_health.v1 import health_pb2_grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api import proto_codec
from ..api.engine_api import ModelInfo
from ..api.loopback import proxy_options
from ..api.request import Load
from . import resume
from .calls import BALANCED_OPTIONS, CHANNEL_OPTIONS, Options, credentials_from, streamed, streamed_async
from .messages import (
    CallError,
    ChatFields,
    Chunk,
    Completion,
    Finish,
    RequestFields,
    SamplingFields,
    Usage,
    bearer,
    call_errors,
    chat_request,
    completion,
    generate_request,
    samples,
)
from .readiness import READY_SECONDS, Readiness, left_seconds
from .retrieval_messages import (
    EmbedFields,
    Ranked,
    RetrievalCall,
    RetrievalFields,
    embed_calls,
    gathered,
    gathered_async,
    joined,
    ranked,
    score_calls,
)

__all__ = [
    "AsyncClient",
    "CallError",
    "ChatFields",
    "Chunk",
    "Client",
    "Completion",
    "EmbedFields",
    "Finish",
    "Ranked",
    "RequestFields",
    "RetrievalFields",
    "SamplingFields",
    "Usage",
    "call_errors",
    "credentials_from",
]


class Client:
    """Synchronous client. Can be shared between threads.

    A KeyboardInterrupt during a stream can leave a gRPC lock held, after which every later call of this client blocks
    forever. To continue after an interrupt, use `AsyncClient`, which receives it as a cancellation.

    Args:
      target: "host:port", or any name that gRPC can resolve.
      credentials: TLS credentials. Without them the connection is not encrypted.
      token: Bearer token sent with every call. Without TLS, anyone on the network path can read it.
      resumes: How many times in a row an interrupted stream is resumed after the tokens already received, on any server
        of the target (see `resume`). Calls are then balanced over the target's healthy addresses. 0 raises on an
        interruption.
      ready_seconds: How long the first call waits for a server that is starting. 0 does not wait.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        resumes: int = 0,
        ready_seconds: float = READY_SECONDS,
    ):
        def channel(options: Options) -> grpc.Channel:
            if credentials is None:
                return grpc.insecure_channel(target, options=(*options, *proxy_options(target)))
            return grpc.secure_channel(target, credentials, options=(*options, *proxy_options(target)))

        self._channel = channel(BALANCED_OPTIONS if resumes else CHANNEL_OPTIONS)
        # A balanced channel reaches no server that is not ready, and so cannot tell what such a server does.
        self._state_channel = channel(CHANNEL_OPTIONS) if resumes else self._channel
        self._resumes = resumes
        self._metadata = bearer(token)
        self._readiness = Readiness(target, ready_seconds, self._metadata, is_secure=credentials is not None)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._state_stub = pb_grpc.InferenceServiceStub(self._state_channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and cancels open calls."""
        self._channel.close()
        self._state_channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Generator[Chunk, None, None]:
        """Streams the continuation of a prompt, given as text or as token ids.

        The call starts when the first chunk is requested. `timeout_seconds` limits the whole call; None sets no limit.
        """
        request = generate_request(prompt, request_id, fields)
        if self._resumes:
            return resume.stream(self._stub, request, timeout_seconds, self._metadata, self._resumes, self._wait)
        return streamed(self._stub.Generate, request, timeout_seconds, self._metadata, self._wait)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> Generator[Chunk, None, None]:
        """Streams the answer to a conversation.

        The server applies the model's chat template. See `generate` for the other arguments.

        Args:
          messages: Messages such as `{"role": "user", "content": "..."}`, oldest first. Tool calls of the assistant are
            written as `{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}`, or
            in OpenAI's form, as are contents in several parts.
          fields: With `answer`, which may be empty, the chunks have the `parts` of the answer: reasoning, content and
            tool calls. `answers.answered` puts them together.

        Raises:
          InvalidRequestError: A message has another form. The error names the message and its key.
        """
        request = chat_request(messages, request_id, fields)
        if self._resumes:
            return resume.stream(self._stub, request, timeout_seconds, self._metadata, self._resumes, self._wait)
        return streamed(self._stub.Chat, request, timeout_seconds, self._metadata, self._wait)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Completion:
        """Like `generate`, but returns the whole output at once.

        Raises:
          ValueError: `n` is not 1. Use `complete_samples` for several samples.
        """
        _check_single(fields)
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, **fields)
        return completion(list(chunks))

    def complete_samples(
        self,
        prompt: str | Sequence[int],
        n: int,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Like `complete`, but returns `n` samples of one prompt. The prompt is computed once."""
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, n=n, **fields)
        return samples(list(chunks), n)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        timeout_seconds: float | None = None,
        **fields: Unpack[EmbedFields],
    ) -> np.ndarray:
        """Returns the embeddings [texts, dimensions] float32 of texts, or of token ids, in their order.

        Queries are embedded with an `instruction`, documents without. Long lists are sent in several calls, one after
        another; `timeout_seconds` limits each of them.
        """
        return self._gathered(self._stub.Embed, embed_calls(texts, fields), timeout_seconds)

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        timeout_seconds: float | None = None,
        **fields: Unpack[RetrievalFields],
    ) -> np.ndarray:
        """Returns the scores [pairs] float32, 0 to 1, of pairs of a query and a document. See `embed` for the rest."""
        return self._gathered(self._stub.Score, score_calls(pairs, fields), timeout_seconds)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RetrievalFields],
    ) -> list[Ranked]:
        """Returns the documents, or the `top_n` best, in descending order of their relevance to the query."""
        request = pb.RerankRequest(query=query, documents=documents, top_n=top_n, **fields)
        timeout_seconds = self._wait(timeout_seconds)
        with call_errors():
            return ranked(self._stub.Rerank(request, timeout=timeout_seconds, metadata=self._metadata))

    def _gathered(self, method: Any, calls: Iterable[RetrievalCall], timeout_seconds: float | None) -> np.ndarray:
        parts = []
        for request, collected in calls:
            seconds = self._wait(timeout_seconds)
            with call_errors():
                call = method(request, timeout=seconds, metadata=self._metadata)
                parts.append(gathered(collected, call))
        return joined(parts)

    def model_info(self, *, timeout_seconds: float | None = None) -> ModelInfo:
        """Returns a description of the served model."""
        timeout_seconds = self._wait(timeout_seconds)
        with call_errors():
            request = pb.GetModelInfoRequest()
            return proto_codec.model_info(
                self._stub.GetModelInfo(request, timeout=timeout_seconds, metadata=self._metadata)
            )

    def server_info(self, *, timeout_seconds: float | None = None) -> pb.GetServerInfoResponse:
        """Returns the state of the server, which answers in every state."""
        with call_errors():
            request = pb.GetServerInfoRequest()
            return self._stub.GetServerInfo(request, timeout=timeout_seconds, metadata=self._metadata)

    def load(self, *, timeout_seconds: float | None = None) -> Load:
        """Returns the current load of the server."""
        timeout_seconds = self._wait(timeout_seconds)
        with call_errors():
            request = pb.GetLoadRequest()
            return proto_codec.load(self._stub.GetLoad(request, timeout=timeout_seconds, metadata=self._metadata))

    def abort(self, request_ids: Sequence[str], *, timeout_seconds: float | None = None) -> int:
        """Cancels open requests of the same caller and returns how many were open."""
        with call_errors():
            request = pb.AbortRequest(request_ids=request_ids)
            call = self._stub.Abort(request, timeout=timeout_seconds, metadata=self._metadata)
            return call.num_aborted

    def _wait(self, timeout_seconds: float | None) -> float | None:
        """Waits before the first call, see `readiness`. Returns what is left of the call's time limit."""
        if self._readiness.is_known:
            return timeout_seconds
        began = time.monotonic()
        self._readiness.run(self._readiness.before_call(self._health, self._state_stub, timeout_seconds))
        return left_seconds(timeout_seconds, began)

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Waits until the server accepts requests.

        Raises:
          CallError: DEADLINE_EXCEEDED if the server is not ready in time, or no connection to it is possible.
        """
        self._readiness.run(self._readiness.until_serving(self._health, timeout_seconds))


class AsyncClient:
    """Asyncio client. Create and use it within one running event loop. Arguments and results are those of `Client`."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        resumes: int = 0,
        ready_seconds: float = READY_SECONDS,
    ):
        def channel(options: Options) -> grpc.aio.Channel:
            if credentials is None:
                return grpc.aio.insecure_channel(target, options=(*options, *proxy_options(target)))
            return grpc.aio.secure_channel(target, credentials, options=(*options, *proxy_options(target)))

        self._channel = channel(BALANCED_OPTIONS if resumes else CHANNEL_OPTIONS)
        # A balanced channel reaches no server that is not ready, and so cannot tell what such a server does.
        self._state_channel = channel(CHANNEL_OPTIONS) if resumes else self._channel
        self._resumes = resumes
        self._metadata = bearer(token)
        self._readiness = Readiness(target, ready_seconds, self._metadata, is_secure=credentials is not None)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._state_stub = pb_grpc.InferenceServiceStub(self._state_channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and cancels open calls."""
        await self._channel.close()
        await self._state_channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> AsyncGenerator[Chunk, None]:
        """See `Client.generate`."""
        request = generate_request(prompt, request_id, fields)
        if self._resumes:
            return resume.stream_async(self._stub, request, timeout_seconds, self._metadata, self._resumes, self._wait)
        return streamed_async(self._stub.Generate, request, timeout_seconds, self._metadata, self._wait)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncGenerator[Chunk, None]:
        """See `Client.chat`."""
        request = chat_request(messages, request_id, fields)
        if self._resumes:
            return resume.stream_async(self._stub, request, timeout_seconds, self._metadata, self._resumes, self._wait)
        return streamed_async(self._stub.Chat, request, timeout_seconds, self._metadata, self._wait)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Completion:
        """See `Client.complete`."""
        _check_single(fields)
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, **fields)
        return completion([chunk async for chunk in chunks])

    async def complete_samples(
        self,
        prompt: str | Sequence[int],
        n: int,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """See `Client.complete_samples`."""
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, n=n, **fields)
        return samples([chunk async for chunk in chunks], n)

    async def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        timeout_seconds: float | None = None,
        **fields: Unpack[EmbedFields],
    ) -> np.ndarray:
        """See `Client.embed`."""
        return await self._gathered(self._stub.Embed, embed_calls(texts, fields), timeout_seconds)

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        timeout_seconds: float | None = None,
        **fields: Unpack[RetrievalFields],
    ) -> np.ndarray:
        """See `Client.score`."""
        return await self._gathered(self._stub.Score, score_calls(pairs, fields), timeout_seconds)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RetrievalFields],
    ) -> list[Ranked]:
        """See `Client.rerank`."""
        request = pb.RerankRequest(query=query, documents=documents, top_n=top_n, **fields)
        timeout_seconds = await self._wait(timeout_seconds)
        with call_errors():
            return ranked(await self._stub.Rerank(request, timeout=timeout_seconds, metadata=self._metadata))

    async def _gathered(self, method: Any, calls: Iterable[RetrievalCall], timeout_seconds: float | None) -> np.ndarray:
        parts = []
        for request, collected in calls:
            seconds = await self._wait(timeout_seconds)
            with call_errors():
                call = method(request, timeout=seconds, metadata=self._metadata)
                parts.append(await gathered_async(collected, call))
        return joined(parts)

    async def model_info(self, *, timeout_seconds: float | None = None) -> ModelInfo:
        """See `Client.model_info`."""
        timeout_seconds = await self._wait(timeout_seconds)
        with call_errors():
            request = pb.GetModelInfoRequest()
            return proto_codec.model_info(
                await self._stub.GetModelInfo(request, timeout=timeout_seconds, metadata=self._metadata)
            )

    async def server_info(self, *, timeout_seconds: float | None = None) -> pb.GetServerInfoResponse:
        """See `Client.server_info`."""
        with call_errors():
            request = pb.GetServerInfoRequest()
            return await self._stub.GetServerInfo(request, timeout=timeout_seconds, metadata=self._metadata)

    async def load(self, *, timeout_seconds: float | None = None) -> Load:
        """See `Client.load`."""
        timeout_seconds = await self._wait(timeout_seconds)
        with call_errors():
            request = pb.GetLoadRequest()
            return proto_codec.load(await self._stub.GetLoad(request, timeout=timeout_seconds, metadata=self._metadata))

    async def abort(self, request_ids: Sequence[str], *, timeout_seconds: float | None = None) -> int:
        """See `Client.abort`."""
        with call_errors():
            request = pb.AbortRequest(request_ids=request_ids)
            call = self._stub.Abort(request, timeout=timeout_seconds, metadata=self._metadata)
            return (await call).num_aborted

    async def _wait(self, timeout_seconds: float | None) -> float | None:
        """See `Client._wait`."""
        if self._readiness.is_known:
            return timeout_seconds
        began = time.monotonic()
        await self._readiness.run_async(self._readiness.before_call(self._health, self._state_stub, timeout_seconds))
        return left_seconds(timeout_seconds, began)

    async def wait_until_ready(self, timeout_seconds: float) -> None:
        """See `Client.wait_until_ready`."""
        await self._readiness.run_async(self._readiness.until_serving(self._health, timeout_seconds))


def _check_single(fields: RequestFields) -> None:
    if (n := fields.get("n")) not in (None, 1):
        raise ValueError(f"n is {n}; complete returns one sample. Use complete_samples for several.")
