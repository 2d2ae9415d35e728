"""Streams that survive their server: what the client does when one breaks off. Imports no jax.

The tokens of an output depend on the seed and on their position, on nothing else. So an interrupted request goes on
anywhere, on any replica of the same model: its prompt and the tokens that have come are sent as a new prompt, with the
same seed, and the next token is the one that would have come. `SamplingParams.num_resumed_tokens` tells the new server
which part is output, so that text and stop strings go on too. Nothing is lost or repeated: a token that was on its way
when the stream broke is simply drawn again.
"""

import asyncio
import dataclasses
import random
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

import grpc

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.request import FinishReason
from ..api.sampling_params import SamplingParams
from .messages import CallError, Chunk, Finish, Usage, call_error, chunk

# Spread calls over all addresses of the target, and leave out those whose health is not SERVING.
BALANCED_CHANNEL_OPTIONS = (
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"round_robin": {}}], '
        '"healthCheckConfig": {"serviceName": "meshserve.v1.InferenceService"}}',
    ),
)
# CANCELLED is what a server that is going away says to calls it has not begun; nobody here cancelled them.
_RETRIED = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED))
_FIRST_DELAY_SECONDS = 0.05
_MAX_DELAY_SECONDS = 2.0


class _Attempts:
    """How often, and how fast, to try again. A token that comes makes every attempt available again."""

    def __init__(self, max_resumes: int, timeout_seconds: float | None):
        self.num_used = 0
        self._max_resumes = max_resumes
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def left_seconds(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def succeeded(self) -> None:
        self.num_used = 0

    def delay_seconds(self, error: grpc.RpcError) -> float:
        """How long to wait before the next attempt; no longer than there is time left.

        Raises:
          CallError: another attempt would not help, or there is none left.
        """
        failure = call_error(error)
        hopeless = failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.retry_seconds is None
        if failure.code not in _RETRIED or hopeless or self.num_used >= self._max_resumes:
            raise failure from error
        delay = min(_FIRST_DELAY_SECONDS * 2**self.num_used, _MAX_DELAY_SECONDS) * random.uniform(0.5, 1.0)
        self.num_used += 1
        delay, left = max(delay, failure.retry_seconds or 0.0), self.left_seconds()
        return delay if left is None else min(delay, left)


class _Run:
    """One request over all its attempts."""

    def __init__(self, request: pb.GenerateRequest | pb.ChatRequest, prompt_token_ids: Sequence[int]):
        self._prompt = tuple(prompt_token_ids)
        if request.HasField("n") and request.n != 1:
            raise ValueError(f"n is {request.n}; a stream that resumes has one sample. Send several requests.")
        self._options = {name: getattr(request, name) for name in ("priority", "cache_salt") if request.HasField(name)}
        self._request_id = request.request_id if request.HasField("request_id") else None
        self._sampling = pb.SamplingParams()
        self._sampling.CopyFrom(request.sampling)
        if not self._sampling.HasField("seed"):
            self._sampling.seed = secrets.randbits(63)
        if not self._sampling.HasField("max_tokens"):
            self._sampling.max_tokens = SamplingParams.max_tokens
        self._received: list[int] = []
        self._num_prompt_logprobs = 0  # that have come, and how many of them this attempt sends again
        self._num_repeated_logprobs = 0
        self._num_requests = 0

    def next_request(self) -> pb.GenerateRequest:
        """What to send now."""
        token_ids = pb.TokenIds(token_ids=[*self._prompt, *self._received])
        request = pb.GenerateRequest(token_ids=token_ids, **self._options)
        request.sampling.CopyFrom(self._sampling)
        request.sampling.max_tokens = self._sampling.max_tokens - len(self._received)
        if self._received:
            request.sampling.ClearField("prompt_logprobs")  # they have all come
        self._num_repeated_logprobs = self._num_prompt_logprobs
        request.sampling.num_resumed_tokens = self._sampling.num_resumed_tokens + len(self._received)
        if self._request_id is not None:
            # The old name may still be taken, by a server that has not noticed that its caller is gone.
            suffix = f"~{self._num_requests}" if self._num_requests else ""
            request.request_id = self._request_id[: 128 - len(suffix)] + suffix
        self._num_requests += 1
        return request

    def take(self, response: pb.GenerateResponse) -> Chunk:
        """The chunk, counted from the beginning of the first attempt."""
        new = chunk(response)
        self._received += new.token_ids
        prompt_logprobs = new.prompt_logprobs[self._num_repeated_logprobs :]
        self._num_repeated_logprobs -= len(new.prompt_logprobs) - len(prompt_logprobs)
        self._num_prompt_logprobs += len(prompt_logprobs)
        finish = None if new.finish is None else self._finish(new.finish.reason)
        return dataclasses.replace(new, prompt_logprobs=prompt_logprobs, finish=finish)

    def overdue_end(self) -> Chunk | None:
        """The end, if every token has come and only the word that this is the end has not."""
        if len(self._received) < self._sampling.max_tokens:
            return None
        return Chunk(text="", token_ids=(), finish=self._finish(FinishReason.LENGTH))

    def _finish(self, reason: FinishReason) -> Finish:
        usage = Usage(num_prompt_tokens=len(self._prompt), num_output_tokens=len(self._received))
        return Finish(reason=reason, usage=usage)


def _tokenize_request(request: pb.GenerateRequest | pb.ChatRequest) -> pb.TokenizeRequest | None:
    """How to learn the tokens of the prompt; None if the request says them."""
    if isinstance(request, pb.ChatRequest):
        return pb.TokenizeRequest(conversation=proto_codec.conversation(request))
    return None if request.HasField("token_ids") else pb.TokenizeRequest(text=request.text)


def _sent_token_ids(request: Any) -> Sequence[int]:
    return request.token_ids.token_ids


def stream(
    stub: Any, request: pb.GenerateRequest | pb.ChatRequest, timeout_seconds: float | None, metadata: Any, resumes: int
) -> Generator[Chunk, None, None]:
    """Streams a request, beginning again wherever it breaks off.

    Args:
      resumes: how often in a row, without a token in between, to try again.

    Raises:
      CallError: what the last attempt failed with.
    """
    attempts, run = _Attempts(resumes, timeout_seconds), None
    asked = _tokenize_request(request)
    while True:
        call = None
        try:
            if run is None:
                token_ids = _sent_token_ids(request) if asked is None else stub.Tokenize(
                    asked, timeout=attempts.left_seconds(), metadata=metadata
                ).token_ids  # fmt: skip
                run = _Run(request, token_ids)
            call = stub.Generate(run.next_request(), timeout=attempts.left_seconds(), metadata=metadata)
            for response in call:
                new = run.take(response)
                attempts.succeeded()
                yield new
                if new.finish is not None:
                    return
            raise CallError(grpc.StatusCode.INTERNAL, "the stream ended without its last message")
        except grpc.RpcError as error:
            time.sleep(attempts.delay_seconds(error))
        finally:
            if call is not None:
                call.cancel()
        if run is not None and (end := run.overdue_end()) is not None:
            yield end
            return


async def stream_async(
    stub: Any, request: pb.GenerateRequest | pb.ChatRequest, timeout_seconds: float | None, metadata: Any, resumes: int
) -> AsyncGenerator[Chunk, None]:
    """As `stream`."""
    attempts, run = _Attempts(resumes, timeout_seconds), None
    asked = _tokenize_request(request)
    while True:
        call = None
        try:
            if run is None:
                token_ids = _sent_token_ids(request) if asked is None else (await stub.Tokenize(
                    asked, timeout=attempts.left_seconds(), metadata=metadata
                )).token_ids  # fmt: skip
                run = _Run(request, token_ids)
            call = stub.Generate(run.next_request(), timeout=attempts.left_seconds(), metadata=metadata)
            async for response in call:
                new = run.take(response)
                attempts.succeeded()
                yield new
                if new.finish is not None:
                    return
            raise CallError(grpc.StatusCode.INTERNAL, "the stream ended without its last message")
        except grpc.RpcError as error:
            await asyncio.sleep(attempts.delay_seconds(error))
        finally:
            if call is not None:
                call.cancel()
        if run is not None and (end := run.overdue_end()) is not None:
            yield end
            return
