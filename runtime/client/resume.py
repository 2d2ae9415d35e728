"""Resumption of interrupted streams by the client. Does not import JAX.

The sampled tokens of a request depend only on the prompt, the seed and the position. An interrupted request can
therefore continue on any replica of the same model: the client sends the prompt and the tokens received so far as a new
prompt with the same seed, and the next token is the one that the first server would have produced.
`SamplingParams.num_resumed_tokens` tells the new server which part of the prompt is output, so that text and stop
strings continue correctly. No token is lost or repeated: a token that was in transit when the stream broke is sampled
again. If only the end is missing, the last tokens are asked for once more, and what has come is left out: the end may
bring text that was held back for a stop string. An answer that comes divided into its parts is resumed as a
conversation, with the tokens received so far beside it, since the new server must know where in the answer they end. A
request with an adapter is resumed with the same one: the first message of a stream has the adapter's digest, and the
resumed request demands it. A replica that has other files under that name refuses it (FAILED_PRECONDITION), instead of
going on with other tokens. One that lacks the adapter answers NOT_FOUND, and another may have it: the next attempt goes
to the next replica.
"""

import asyncio
import dataclasses
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import Any

import grpc

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.request import FinishReason
from ..text.answers.answer_parts import behind, size_of
from .messages import CallError, Chunk, Finish, Usage, call_error, chunk

# Balances calls over all addresses of the target, leaving out those whose health is not SERVING.
BALANCED_CHANNEL_OPTIONS = (
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"round_robin": {}}], '
        '"healthCheckConfig": {"serviceName": "meshserve.v1.InferenceService"}}',
    ),
)
# A server that shuts down answers CANCELLED to calls that it has not started, so CANCELLED is retried too.
_RETRIED = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED))
_OPTIONS = ("priority", "cache_salt", "adapter")  # that each attempt of a GenerateRequest has
Wait = Callable[[float | None], float | None]
WaitAsync = Callable[[float | None], Awaitable[float | None]]
# Further attempts after answers that there is no adapter of that name, while no replica has begun to answer: it may be
# mistyped.
_MAX_UNKNOWN = 4
_FIRST_DELAY_SECONDS = 0.05
_MAX_DELAY_SECONDS = 2.0


class _Attempts:
    """Retry budget and backoff. Every received token resets the number of attempts."""

    def __init__(self, max_resumes: int, timeout_seconds: float | None):
        self.num_used = 0
        self._max_resumes = max_resumes
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def left_seconds(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def succeeded(self) -> None:
        self.num_used = 0

    def delay_seconds(self, error: grpc.RpcError, run: "_Run | None") -> float:
        """Returns the delay before the next attempt, limited to the time left.

        Args:
          error: That of the last attempt.
          run: The request, if its prompt is known.

        Raises:
          CallError: The error cannot be retried, or no attempts are left.
        """
        failure = call_error(error)
        hopeless = failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.retry_seconds is None
        is_elsewhere = failure.code is grpc.StatusCode.NOT_FOUND and run is not None and run.has_adapter
        hopeless |= failure.code not in _RETRIED and not is_elsewhere
        if is_elsewhere and run is not None and not run.has_begun:
            hopeless |= self.num_used >= _MAX_UNKNOWN
        if hopeless or self.num_used >= self._max_resumes:
            raise failure from None
        delay = min(_FIRST_DELAY_SECONDS * 2**self.num_used, _MAX_DELAY_SECONDS) * random.uniform(0.5, 1.0)
        self.num_used += 1
        delay, left = max(delay, failure.retry_seconds or 0.0), self.left_seconds()
        return delay if left is None else min(delay, left)


class _Run:
    """State of one request across all its attempts."""

    def __init__(
        self, request: pb.GenerateRequest | pb.ChatRequest, prompt_token_ids: Sequence[int], max_context_tokens: int
    ):
        self._prompt = tuple(prompt_token_ids)
        self._max_context_tokens = max_context_tokens  # 0 if unknown
        if request.HasField("n") and request.n != 1:
            raise ValueError(f"n is {request.n}; a resumable stream has one sample. Send several requests instead.")
        self._chat = request if isinstance(request, pb.ChatRequest) and request.HasField("answer") else None
        self._options = {name: getattr(request, name) for name in _OPTIONS if request.HasField(name)}
        self._adapter_digest = request.adapter_digest if request.HasField("adapter_digest") else ""
        self._request_id = request.request_id if request.HasField("request_id") else None
        self._sampling = pb.SamplingParams()
        self._sampling.CopyFrom(request.sampling)
        if not self._sampling.HasField("seed"):
            self._sampling.seed = secrets.randbits(63)
        self._received: list[int] = []
        self._num_prompt_logprobs = 0  # received so far
        self._num_repeated_logprobs = 0  # those that this attempt still has to send again
        # The last tokens received, and the size of what came with and after them.
        self._num_last_tokens = self._last_size = 0
        self._num_repeated_tokens = self._repeated_size = 0  # what is still to come again
        self._num_requests = 0

    @property
    def has_adapter(self) -> bool:
        return bool(self._options.get("adapter") or (self._chat is not None and self._chat.adapter))

    @property
    def has_begun(self) -> bool:
        """Whether a server has answered with tokens, so that the adapter exists."""
        return bool(self._received)

    def start(self, stub: Any, timeout_seconds: float | None, metadata: Any) -> Any:
        """Begins the call of the next attempt."""
        method = stub.Generate if self._chat is None else stub.Chat
        return method(self.next_request(), timeout=timeout_seconds, metadata=metadata)

    def next_request(self) -> pb.GenerateRequest | pb.ChatRequest:
        """Builds the request of the next attempt."""
        if self._is_overdue():  # the end may bring text that was held back, and needs a token to come with
            self._num_repeated_tokens += self._num_last_tokens
            self._repeated_size += self._last_size
            del self._received[len(self._received) - self._num_last_tokens :]
        request: pb.GenerateRequest | pb.ChatRequest
        if self._chat is not None:
            request = pb.ChatRequest()
            request.CopyFrom(self._chat)
            request.resumed_token_ids.extend(self._received)
        else:
            token_ids = pb.TokenIds(token_ids=[*self._prompt, *self._received])
            request = pb.GenerateRequest(token_ids=token_ids, **self._options)
        if self._adapter_digest:
            request.adapter_digest = self._adapter_digest
        request.sampling.CopyFrom(self._sampling)
        if self._sampling.HasField("max_tokens"):
            request.sampling.max_tokens = self._sampling.max_tokens - len(self._received)
        if self._received:
            request.sampling.ClearField("prompt_logprobs")  # all of them were received before the first token
        self._num_repeated_logprobs = self._num_prompt_logprobs
        request.sampling.num_resumed_tokens = self._sampling.num_resumed_tokens + len(self._received)
        if self._request_id is not None:
            # The previous id may still be in use on a server that has not noticed the disconnect.
            suffix = f"~{self._num_requests}" if self._num_requests else ""
            request.request_id = self._request_id[: 128 - len(suffix)] + suffix
        self._num_requests += 1
        return request

    def take(self, response: pb.GenerateResponse | pb.ChatResponse) -> Chunk:
        """Converts a response to a chunk whose counts start at the first attempt."""
        new = chunk(response)
        self._adapter_digest = response.adapter_digest or self._adapter_digest
        self._received += new.token_ids
        new = self._unrepeated(new)
        prompt_logprobs = new.prompt_logprobs[self._num_repeated_logprobs :]
        self._num_repeated_logprobs -= len(new.prompt_logprobs) - len(prompt_logprobs)
        self._num_prompt_logprobs += len(prompt_logprobs)
        finish = None if new.finish is None else self._finish(new.finish.reason, new.finish.usage.num_reasoning_tokens)
        return dataclasses.replace(new, prompt_logprobs=prompt_logprobs, finish=finish)

    def _unrepeated(self, new: Chunk) -> Chunk:
        """Returns a chunk without what earlier attempts have received."""
        num_tokens = min(self._num_repeated_tokens, len(new.token_ids))
        self._num_repeated_tokens -= num_tokens
        text, parts = new.text[self._repeated_size :], behind(new.parts, self._repeated_size)
        size = sum(map(size_of, new.parts)) if new.parts else len(new.text)  # an answer in parts is no text
        self._repeated_size = max(0, self._repeated_size - size)
        if new.token_ids:
            self._num_last_tokens, self._last_size = len(new.token_ids), 0
        self._last_size += size
        return dataclasses.replace(
            new, text=text, token_ids=new.token_ids[num_tokens:], logprobs=new.logprobs[num_tokens:], parts=parts
        )

    def _is_overdue(self) -> bool:
        """Returns whether all possible tokens were received and only the end of the stream is missing."""
        most = self._sampling.max_tokens if self._sampling.HasField("max_tokens") else None
        if most is None and self._max_context_tokens:
            most = self._max_context_tokens - len(self._prompt)
        return most is not None and len(self._received) >= most

    def _finish(self, reason: FinishReason, num_reasoning_tokens: int = 0) -> Finish:
        usage = Usage(
            num_prompt_tokens=len(self._prompt),
            num_output_tokens=len(self._received),
            num_reasoning_tokens=num_reasoning_tokens,
        )
        return Finish(reason=reason, usage=usage)


def _tokenize_request(request: pb.GenerateRequest | pb.ChatRequest) -> pb.TokenizeRequest | None:
    """Returns the request that tokenizes the prompt, or None if the prompt is given as token ids."""
    if isinstance(request, pb.ChatRequest):
        return pb.TokenizeRequest(conversation=proto_codec.conversation(request))
    return None if request.HasField("token_ids") else pb.TokenizeRequest(text=request.text)


def _is_open(request: pb.GenerateRequest | pb.ChatRequest) -> bool:
    """Returns whether the server decides how long the output is, which the client must know to resume it."""
    return not request.sampling.HasField("max_tokens")


def _bound(request: pb.GenerateRequest | pb.ChatRequest, info: pb.GetModelInfoResponse | None) -> int:
    """Sets max_tokens to the server's default, if it has one. Returns the length of its context; 0 if unknown."""
    if info is None:
        return 0
    if info.default_sampling.max_tokens:
        request.sampling.max_tokens = info.default_sampling.max_tokens
    return info.max_context_tokens


def _model_info(stub: Any, timeout: float | None, metadata: Any) -> pb.GetModelInfoResponse | None:
    """Returns the description of the model, or None if the caller's token does not permit it."""
    try:
        return stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout, metadata=metadata)
    except grpc.RpcError as error:
        if call_error(error).code is grpc.StatusCode.PERMISSION_DENIED:
            return None
        raise


async def _model_info_async(stub: Any, timeout: float | None, metadata: Any) -> pb.GetModelInfoResponse | None:
    """Asyncio version of `_model_info`."""
    try:
        return await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout, metadata=metadata)
    except grpc.RpcError as error:
        if call_error(error).code is grpc.StatusCode.PERMISSION_DENIED:
            return None
        raise


def _sent_token_ids(request: Any) -> Sequence[int]:
    return request.token_ids.token_ids


def stream(
    stub: Any,
    request: pb.GenerateRequest | pb.ChatRequest,
    timeout_seconds: float | None,
    metadata: Any,
    resumes: int,
    wait: Wait,
) -> Generator[Chunk, None, None]:
    """Streams a request and resumes it wherever it is interrupted.

    Args:
      resumes: How many attempts in a row may fail without a new token.
      wait: Waits until the server is ready and returns what is left of the time limit.

    Raises:
      CallError: The error of the last attempt.
    """
    attempts, run = _Attempts(resumes, wait(timeout_seconds)), None
    asked = _tokenize_request(request)
    while True:
        call = None
        try:
            if run is None:
                info = _model_info(stub, attempts.left_seconds(), metadata) if _is_open(request) else None
                token_ids = _sent_token_ids(request) if asked is None else stub.Tokenize(
                    asked, timeout=attempts.left_seconds(), metadata=metadata
                ).token_ids  # fmt: skip
                run = _Run(request, token_ids, _bound(request, info))
            call = run.start(stub, attempts.left_seconds(), metadata)
            for response in call:
                new = run.take(response)
                if new.token_ids:
                    attempts.succeeded()
                yield new
                if new.finish is not None:
                    return
            raise CallError(grpc.StatusCode.INTERNAL, "the stream ended before its last message")
        except grpc.RpcError as error:
            time.sleep(attempts.delay_seconds(error, run))
        finally:
            if call is not None:
                call.cancel()


async def stream_async(
    stub: Any,
    request: pb.GenerateRequest | pb.ChatRequest,
    timeout_seconds: float | None,
    metadata: Any,
    resumes: int,
    wait: WaitAsync,
) -> AsyncGenerator[Chunk, None]:
    """Asyncio version of `stream`."""
    attempts, run = _Attempts(resumes, await wait(timeout_seconds)), None
    asked = _tokenize_request(request)
    while True:
        call = None
        try:
            if run is None:
                info = await _model_info_async(stub, attempts.left_seconds(), metadata) if _is_open(request) else None
                token_ids = _sent_token_ids(request) if asked is None else (await stub.Tokenize(
                    asked, timeout=attempts.left_seconds(), metadata=metadata
                )).token_ids  # fmt: skip
                run = _Run(request, token_ids, _bound(request, info))
            call = run.start(stub, attempts.left_seconds(), metadata)
            async for response in call:
                new = run.take(response)
                if new.token_ids:
                    attempts.succeeded()
                yield new
                if new.finish is not None:
                    return
            raise CallError(grpc.StatusCode.INTERNAL, "the stream ended before its last message")
        except grpc.RpcError as error:
            await asyncio.sleep(attempts.delay_seconds(error, run))
        finally:
            if call is not None:
                call.cancel()
