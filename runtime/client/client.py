"""A Python client of a meshserve server. Imports no jax.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("The sea", max_tokens=64, temperature=0.0):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Whatever goes wrong in a call raises `CallError`, which carries the
status code and the server's hints; grpc's own error is its `__cause__`. Values that cannot be sent at all raise
ValueError or TypeError before the call. Leaving the loop over `generate` early cancels the request, once nothing refers
to the generator any more; its `close` does so at once.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api import proto_codec
from ..api.engine_api import ModelInfo
from ..api.errors import ConfigError
from ..api.request import Load
from . import resume
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
    chunk,
    completion,
    generate_request,
    samples,
)

__all__ = [
    "AsyncClient",
    "CallError",
    "ChatFields",
    "Chunk",
    "Client",
    "Completion",
    "Finish",
    "RequestFields",
    "SamplingFields",
    "Usage",
    "call_errors",
    "credentials_from",
]

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # its default of two minutes would let a server wait that has come
)
_HEALTH_REQUEST = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["InferenceService"].full_name)
_HEALTH_POLL_SECONDS = 0.1


def credentials_from(tls_ca: Path | None, token_file: Path | None) -> tuple[grpc.ChannelCredentials | None, str | None]:
    """`credentials` and `token` of a client, out of files.

    Args:
      tls_ca: PEM, of the authority that signed the server's certificate; None: no TLS.
      token_file: None: no token.

    Raises:
      ConfigError: a file cannot be read.
    """
    try:
        credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes()) if tls_ca is not None else None
        return credentials, token_file.read_text().strip() if token_file is not None else None
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{token_file} is no text file; it holds a token and nothing else.") from None


class Client:
    """Calls from ordinary code. Safe to share between threads.

    A KeyboardInterrupt while a stream is read can leave a lock of grpc held, and then every later call of this client
    waits for ever. Who means to go on after one uses `AsyncClient`, which an interrupt reaches as a cancellation.

    Args:
      target: "host:port", or any name gRPC resolves.
      credentials: for TLS; without them the connection is not encrypted.
      resumes: how often in a row an interrupted stream may begin again, on any server of the target, with the tokens
        that have come (`resume`); calls are then spread over the target's healthy addresses. 0: an interruption raises.
      token: shown with every call. Without TLS anybody on the way can read it.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        resumes: int = 0,
    ):
        options = _channel_options(resumes)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._resumes = resumes
        self._metadata = bearer(token)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Open calls are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Generator[Chunk, None, None]:
        """Streams the continuation of a prompt, given as text or as token ids.

        The call starts with the first chunk asked for. `timeout_seconds` is for the whole of it; None waits for ever.
        """
        request = generate_request(prompt, request_id, fields)
        if self._resumes:
            return resume.stream(self._stub, request, timeout_seconds, self._metadata, self._resumes)
        return _chunks(self._stub.Generate, request, timeout_seconds, self._metadata)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> Generator[Chunk, None, None]:
        """Streams the answer to a conversation: `{"role": "user", "content": "..."}` and the like, oldest first. The
        server applies the model's chat template. Calls of the assistant are written `{"role": "assistant", "content":
        "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}`. See `generate` for the rest."""
        request = chat_request(messages, request_id, fields)
        if self._resumes:
            return resume.stream(self._stub, request, timeout_seconds, self._metadata, self._resumes)
        return _chunks(self._stub.Chat, request, timeout_seconds, self._metadata)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> Completion:
        """As `generate`, all at once.

        Raises:
          ValueError: several samples are asked for; `complete_samples` keeps them apart.
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
        """As `complete`, `n` samples of one prompt, which is computed once."""
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, n=n, **fields)
        return samples(list(chunks), n)

    def model_info(self, *, timeout_seconds: float | None = None) -> ModelInfo:
        """What is served."""
        with call_errors():
            request = pb.GetModelInfoRequest()
            return proto_codec.model_info(
                self._stub.GetModelInfo(request, timeout=timeout_seconds, metadata=self._metadata)
            )

    def server_info(self, *, timeout_seconds: float | None = None) -> pb.GetServerInfoResponse:
        """How the server is; answered in every state."""
        with call_errors():
            request = pb.GetServerInfoRequest()
            return self._stub.GetServerInfo(request, timeout=timeout_seconds, metadata=self._metadata)

    def load(self, *, timeout_seconds: float | None = None) -> Load:
        """How busy the server is now."""
        with call_errors():
            request = pb.GetLoadRequest()
            return proto_codec.load(self._stub.GetLoad(request, timeout=timeout_seconds, metadata=self._metadata))

    def abort(self, request_ids: Sequence[str], *, timeout_seconds: float | None = None) -> int:
        """Ends requests of the same caller; returns how many were open."""
        with call_errors():
            request = pb.AbortRequest(request_ids=request_ids)
            call = self._stub.Abort(request, timeout=timeout_seconds, metadata=self._metadata)
            return call.num_aborted

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Returns once the server takes requests.

        Raises:
          CallError: DEADLINE_EXCEEDED if it does not in time.
        """
        end = time.monotonic() + timeout_seconds
        while (left := end - time.monotonic()) > 0:
            try:
                if _is_serving(self._health.Check(_HEALTH_REQUEST, timeout=left)):
                    return
            except grpc.RpcError:
                pass  # not there yet
            time.sleep(_HEALTH_POLL_SECONDS)
        raise _not_ready(timeout_seconds)


class AsyncClient:
    """Calls from asyncio. Make it, and use it, within one running loop. Arguments and results are those of `Client`."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        resumes: int = 0,
    ):
        options = _channel_options(resumes)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._resumes = resumes
        self._metadata = bearer(token)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Open calls are cancelled."""
        await self._channel.close()

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
            return resume.stream_async(self._stub, request, timeout_seconds, self._metadata, self._resumes)
        return _chunks_async(self._stub.Generate, request, timeout_seconds, self._metadata)

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
            return resume.stream_async(self._stub, request, timeout_seconds, self._metadata, self._resumes)
        return _chunks_async(self._stub.Chat, request, timeout_seconds, self._metadata)

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

    async def model_info(self, *, timeout_seconds: float | None = None) -> ModelInfo:
        """What is served."""
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
        """How busy the server is now."""
        with call_errors():
            request = pb.GetLoadRequest()
            return proto_codec.load(await self._stub.GetLoad(request, timeout=timeout_seconds, metadata=self._metadata))

    async def abort(self, request_ids: Sequence[str], *, timeout_seconds: float | None = None) -> int:
        """See `Client.abort`."""
        with call_errors():
            request = pb.AbortRequest(request_ids=request_ids)
            call = self._stub.Abort(request, timeout=timeout_seconds, metadata=self._metadata)
            return (await call).num_aborted

    async def wait_until_ready(self, timeout_seconds: float) -> None:
        """See `Client.wait_until_ready`."""
        end = time.monotonic() + timeout_seconds
        while (left := end - time.monotonic()) > 0:
            try:
                if _is_serving(await self._health.Check(_HEALTH_REQUEST, timeout=left)):
                    return
            except grpc.RpcError:
                pass  # not there yet
            await asyncio.sleep(_HEALTH_POLL_SECONDS)
        raise _not_ready(timeout_seconds)


def _check_single(fields: RequestFields) -> None:
    if (n := fields.get("n", 1)) != 1:
        raise ValueError(f"n is {n}; ask for several samples with complete_samples.")


def _channel_options(resumes: int) -> tuple[tuple[str, Any], ...]:
    return _CHANNEL_OPTIONS + (resume.BALANCED_CHANNEL_OPTIONS if resumes else ())


def _chunks(method: Any, request: Any, timeout_seconds: float | None, metadata: Any) -> Generator[Chunk, None, None]:
    call = method(request, timeout=timeout_seconds, metadata=metadata)
    try:
        with call_errors():
            for response in call:
                yield chunk(response)
    finally:
        call.cancel()  # does nothing to a call that has ended


async def _chunks_async(
    method: Any, request: Any, timeout_seconds: float | None, metadata: Any
) -> AsyncGenerator[Chunk, None]:
    call = method(request, timeout=timeout_seconds, metadata=metadata)
    try:
        with call_errors():
            async for response in call:
                yield chunk(response)
    finally:
        call.cancel()


def _is_serving(response: Any) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


def _not_ready(timeout_seconds: float) -> CallError:
    return CallError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the server was not ready within {timeout_seconds} s")
