"""Steps 1 and 10 of 10, the edge: check, submit, stream, map errors. In: gRPC requests. Out: streams of text.

Knows no jax: the engine is whatever keeps `contract.Engine`. Everything here runs on one event loop; the engine's
thread reaches it through `mailbox.Mailroom.deliver` only. `lifecycle` binds the port, starts and stops it all.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from . import wire
from .contract import Engine, ModelInfo
from .errors import DeadlineError, EngineStoppedError, InvalidRequestError, QueueFullError, UnsupportedModelError
from .mailbox import Mailbox, Mailroom, RequestIdInUseError, SlowReaderError
from .request import FinishReason, RequestOptions, SamplingParams
from .tokenizer import Tokenizer

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

# The one table from errors to status codes. What it does not list is a fault of ours: INTERNAL.
GRPC_STATUS: Mapping[type[Exception], grpc.StatusCode] = MappingProxyType(
    {
        InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
        UnsupportedModelError: grpc.StatusCode.FAILED_PRECONDITION,
        RequestIdInUseError: grpc.StatusCode.ALREADY_EXISTS,
        QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        SlowReaderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
        EngineStoppedError: grpc.StatusCode.UNAVAILABLE,
    }
)

_MAX_REQUEST_ID_CHARS = 128
_MAX_ROLE_CHARS = 64
_MAX_INLINE_CHARS = 2_000  # takes about 1 ms to tokenise; longer prompts would hold up every stream
_DEADLINE_SLACK_SECONDS = 0.1  # the caller's clock started earlier: its cancel can overtake our own (by 2 ms, measured)
_MAX_STATUS_BYTES = 1_024  # all metadata of a call shares 8 KiB, and percent-encoding triples the message

_log = logging.getLogger(__name__)


class Edge(pb_grpc.InferenceServiceServicer):
    """The InferenceService. Refuses requests until `accept` is called."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, info: ModelInfo, mailroom: Mailroom):
        self.engine = engine
        self.mailroom = mailroom
        self._tokenizer = tokenizer
        self._info = info
        self._refusal: str | None = "the server is starting; wait until its health is SERVING"

    def accept(self) -> None:
        """From now on requests are taken."""
        self._refusal = None

    def refuse(self, reason: str) -> None:
        """From now on new requests get UNAVAILABLE with `reason`."""
        self._refusal = reason

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        await self._answer(request, self._prompt_token_ids, pb.GenerateResponse, context)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:
        await self._answer(request, self._chat_token_ids, pb.ChatResponse, context)

    async def _answer(
        self,
        request: Any,
        tokenise: Callable[[Any], Awaitable[tuple[int, ...]]],
        kind: type[wire.AnswerMessage],
        context: Any,
    ) -> None:
        """Streams one request. With `context.write` rather than `yield`: a generator that is suspended when the caller
        goes away is told by GeneratorExit, and only once it is collected."""
        try:
            request_id = _request_id(request)
            params = wire.sampling_params(request.sampling)
            options = wire.request_options(request, context.time_remaining())
            prompt_token_ids = await tokenise(request)
            if self._refusal is not None:
                raise EngineStoppedError(self._refusal)
            mailbox = self._submit(request_id, prompt_token_ids, params, options)
            await self._stream(mailbox, kind, context)
        except grpc.aio.InternalError as error:
            # A write found the caller gone before grpc had cancelled this task. No fault, and nobody to tell.
            raise asyncio.CancelledError from error
        except Exception as error:  # a cancelled call raises CancelledError, which is not among these
            await _abort(context, error)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        return wire.model_info_response(self._info)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return wire.load_response(self.engine.load())

    async def _prompt_token_ids(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        field = request.WhichOneof("prompt")
        if field is None:
            raise InvalidRequestError("prompt", "got neither text nor token_ids; send one of them.")
        if field == "token_ids":
            token_ids = tuple(request.token_ids.token_ids)
        elif len(request.text) <= _MAX_INLINE_CHARS:
            token_ids = self._tokenizer.encode(request.text)
        else:
            token_ids = await asyncio.to_thread(self._tokenizer.encode, request.text)
        return self._checked(field, token_ids)

    def _checked(self, field: str, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens, if this server can serve them."""
        if not token_ids:
            raise InvalidRequestError(
                field, "the prompt has 0 tokens; allowed is 1 or more. Send something to continue."
            )
        vocab_size, max_context = self._info.vocab_size, self._info.max_context_tokens
        if len(token_ids) >= max_context:
            raise InvalidRequestError(
                field,
                f"the prompt has {len(token_ids)} tokens; this server accepts {max_context - 1} (max_context "
                f"{max_context}, less one for the output). Shorten it or restart with --max-context.",
            )
        if max(token_ids) >= vocab_size:
            index, bad = next((i, token_id) for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
            raise InvalidRequestError(
                field,
                f"token {index} is {bad}; allowed is 0 to {vocab_size - 1}. Use the tokenizer of {self._info.name}.",
            )
        return token_ids

    async def _chat_token_ids(self, request: pb.ChatRequest) -> tuple[int, ...]:
        if not request.messages:
            raise InvalidRequestError("messages", "got none; send one or more.")
        for index, message in enumerate(request.messages):
            if not 1 <= len(message.role) <= _MAX_ROLE_CHARS:
                raise InvalidRequestError(
                    f"messages[{index}].role",
                    f"has {len(message.role)} characters; allowed is 1 to {_MAX_ROLE_CHARS}. Templates know system, "
                    "user and assistant.",
                )
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        options = {"enable_thinking": request.enable_thinking} if request.HasField("enable_thinking") else {}
        token_ids = await asyncio.to_thread(self._render, messages, options)
        return self._checked("messages", token_ids)

    def _render(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, bool]) -> tuple[int, ...]:
        return self._tokenizer.encode(self._tokenizer.render_chat(messages, **options))

    def _submit(
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams, options: RequestOptions
    ) -> Mailbox:
        mailbox = self.mailroom.open(request_id, options.n)
        try:
            self.engine.submit(request_id, prompt_token_ids, params, options)
        except BaseException:
            self.mailroom.discard(mailbox)
            raise
        return mailbox

    async def _stream(self, mailbox: Mailbox, kind: type[wire.AnswerMessage], context: Any) -> None:
        try:
            num_open_samples = mailbox.num_samples
            while num_open_samples:
                output = await mailbox.take()
                num_open_samples -= output.finish_reason is not None
                if output.finish_reason is FinishReason.ERROR and self.engine.failure is not None:
                    raise failure_error(self.engine)
                if output.finish_reason is FinishReason.DEADLINE:
                    raise DeadlineError(output.message)
                await context.write(wire.answer(kind, output))
        finally:
            remaining = context.time_remaining()  # None if the call has no deadline
            is_late = remaining is not None and remaining < _DEADLINE_SLACK_SECONDS
            self.mailroom.close(mailbox, FinishReason.DEADLINE if is_late else FinishReason.CANCELLED)


def _request_id(request: pb.GenerateRequest | pb.ChatRequest) -> str:
    if not request.HasField("request_id"):
        return uuid.uuid4().hex
    request_id = request.request_id
    if not 1 <= len(request_id) <= _MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequestError(
            "request_id",
            f"got {request_id[:_MAX_REQUEST_ID_CHARS]!r} of {len(request_id)} characters; allowed is 1 to "
            f"{_MAX_REQUEST_ID_CHARS} printable ones. Leave it out and the server draws one.",
        )
    return request_id


def failure_error(engine: Engine) -> EngineStoppedError:
    """What callers of a dead engine get."""
    return EngineStoppedError(f"the engine failed: {engine.failure}. The server stops; try another, or this one later")


async def _abort(context: Any, error: Exception) -> None:
    """Ends the call with the status of `error`, and details where a program can use them."""
    code = next((code for kind, code in GRPC_STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    message = str(error)
    if code is grpc.StatusCode.INTERNAL:
        _log.error("a request failed", exc_info=error)
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    message = message.encode()[:_MAX_STATUS_BYTES].decode(errors="ignore")
    status = status_pb2.Status(code=code.value[0], message=message)
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    elif isinstance(error, QueueFullError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_seconds * 1000))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))


def _packed(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
