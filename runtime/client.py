"""A Python client of a meshserve server. Imports no jax.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("The sea", max_tokens=64, temperature=0.0):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Whatever goes wrong in a call raises `CallError`, which carries the
status code and the server's hints; grpc's own error is its `__cause__`. Values that cannot be sent at all raise
ValueError or TypeError before the call. Leaving the loop over `generate` early cancels the request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from . import wire
from .contract import ModelInfo
from .errors import MeshserveError
from .request import FinishReason, Load

_CHANNEL_OPTIONS = (("grpc.keepalive_time_ms", 30_000), ("grpc.max_receive_message_length", 16 * 2**20))
_HEALTH_REQUEST = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["InferenceService"].full_name)
_HEALTH_POLL_SECONDS = 0.1


class SamplingFields(TypedDict, total=False):
    """Fields of SamplingParams in inference.proto. One that is left out takes the server's default."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool
    stop: Sequence[str]


class GenerateFields(SamplingFields, total=False):
    """Fields of GenerateRequest beside them."""

    priority: int
    cache_salt: str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens counted for one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What is new since the chunk before. The last chunk of each sample, and only it, has `finish`."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None
    index: int = 0  # of the sample


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The whole output of a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


class CallError(MeshserveError):
    """A call failed.

    `field` is the request field at fault where the server named one, `retry_seconds` its hint when to try again.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, *, field: str | None = None, retry_seconds: float | None = None
    ):
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_seconds = retry_seconds


class Client:
    """Calls from ordinary code. Safe to share between threads.

    Args:
      target: "host:port", or any name gRPC resolves.
      credentials: for TLS; without them the connection is not encrypted.
    """

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None):
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
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
        n: int = 1,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> Iterator[Chunk]:
        """Streams the continuation of a prompt, given as text or as token ids; of `n` samples, as they come.

        The call starts with the first chunk asked for. `timeout_seconds` is for the whole of it; None waits for ever.
        """
        request = _generate_request(prompt, request_id, n, fields)
        call = self._stub.Generate(request, timeout=timeout_seconds)
        try:
            with call_errors():
                for response in call:
                    yield _chunk(response)
        finally:
            call.cancel()  # does nothing to a call that has ended

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> Completion:
        """As `generate`, all at once."""
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, **fields)
        return _completion(list(chunks))

    def complete_samples(
        self,
        prompt: str | Sequence[int],
        n: int,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> list[Completion]:
        """As `complete`, `n` samples of one prompt."""
        chunks = list(self.generate(prompt, n=n, request_id=request_id, timeout_seconds=timeout_seconds, **fields))
        return _completions(chunks, n)

    def model_info(self, *, timeout_seconds: float | None = None) -> ModelInfo:
        """What is served."""
        with call_errors():
            return wire.model_info(self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_seconds))

    def load(self, *, timeout_seconds: float | None = None) -> Load:
        """How busy the server is now."""
        with call_errors():
            return wire.load(self._stub.GetLoad(pb.GetLoadRequest(), timeout=timeout_seconds))

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

    def __init__(self, target: str, *, credentials: grpc.ChannelCredentials | None = None):
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Open calls are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> AsyncIterator[Chunk]:
        """See `Client.generate`."""
        request = _generate_request(prompt, request_id, n, fields)
        call = self._stub.Generate(request, timeout=timeout_seconds)
        try:
            with call_errors():
                async for response in call:
                    yield _chunk(response)
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> Completion:
        """See `Client.complete`."""
        chunks = self.generate(prompt, request_id=request_id, timeout_seconds=timeout_seconds, **fields)
        return _completion([chunk async for chunk in chunks])

    async def complete_samples(
        self,
        prompt: str | Sequence[int],
        n: int,
        *,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> list[Completion]:
        """See `Client.complete_samples`."""
        chunks = self.generate(prompt, n=n, request_id=request_id, timeout_seconds=timeout_seconds, **fields)
        return _completions([chunk async for chunk in chunks], n)

    async def model_info(self, *, timeout_seconds: float | None = None) -> ModelInfo:
        """What is served."""
        with call_errors():
            return wire.model_info(await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_seconds))

    async def load(self, *, timeout_seconds: float | None = None) -> Load:
        """How busy the server is now."""
        with call_errors():
            return wire.load(await self._stub.GetLoad(pb.GetLoadRequest(), timeout=timeout_seconds))

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


def _generate_request(
    prompt: str | Sequence[int], request_id: str | None, n: int, fields: GenerateFields
) -> pb.GenerateRequest:
    sampling: dict[str, Any] = dict(fields)
    if isinstance(sampling.get("stop"), str):
        raise TypeError(f"stop is the string {sampling['stop']!r}; it takes a list of strings.")
    options: dict[str, Any] = {name: sampling.pop(name) for name in ("priority", "cache_salt") if name in sampling}
    if n != 1:
        options["n"] = n
    request = pb.GenerateRequest(request_id=request_id, sampling=pb.SamplingParams(**sampling), **options)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(token_ids=prompt))
    return request


def _chunk(response: pb.GenerateResponse) -> Chunk:
    finish = None
    if response.HasField("finish"):
        usage = response.finish.usage
        finish = Finish(
            reason=wire.finish_reason(response.finish.reason),
            usage=Usage(
                num_prompt_tokens=usage.num_prompt_tokens,
                num_output_tokens=usage.num_output_tokens,
                num_cached_tokens=usage.num_cached_tokens,
            ),
        )
        if finish.reason is FinishReason.ERROR:
            raise CallError(grpc.StatusCode.INTERNAL, response.finish.message)
    return Chunk(text=response.text, token_ids=tuple(response.token_ids), finish=finish, index=response.index)


def _completion(chunks: Sequence[Chunk]) -> Completion:
    finish = chunks[-1].finish if chunks else None
    if finish is None:
        raise CallError(grpc.StatusCode.INTERNAL, "the stream ended without its last message")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=finish.reason,
        usage=finish.usage,
    )


def _completions(chunks: Sequence[Chunk], n: int) -> list[Completion]:
    return [_completion([chunk for chunk in chunks if chunk.index == index]) for index in range(n)]


@contextlib.contextmanager
def call_errors() -> Iterator[None]:
    """Turns grpc's errors into `CallError`, for those who use the stub themselves."""
    try:
        yield
    except grpc.RpcError as error:
        raise _call_error(error) from error


def _call_error(error: Any) -> CallError:
    """From grpc's error, sync or async: both are calls that have ended, with code, details and trailing metadata."""
    field, retry_seconds = None, None
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata.get("grpc-status-details-bin", b""))
    for detail in status.details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry_info):
            retry_seconds = retry_info.retry_delay.ToNanoseconds() / 1e9
    return CallError(error.code(), error.details() or "", field=field, retry_seconds=retry_seconds)


def _is_serving(response: Any) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


def _not_ready(timeout_seconds: float) -> CallError:
    return CallError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the server was not ready within {timeout_seconds} s")
