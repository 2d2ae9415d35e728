"""Implements the InferenceService: checks requests, submits them and streams their outputs. Steps 1 and 10 of 10.

In: gRPC requests. Out: streams of text. Does not import jax: the engine is anything that implements
`engine_api.Engine`. All code here runs on one event loop; the engine's thread reaches it only through
`OutputQueues.deliver`. `lifecycle` binds the ports and starts and stops the server, `auth` decides who may call, and
`prompt_intake` converts requests to tokens.
"""

import contextlib
import dataclasses
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api import proto_codec
from ..api.engine_api import Engine, ModelInfo
from ..api.errors import (
    DeadlineError,
    EngineStoppedError,
    InvalidRequestError,
    QuotaExceededError,
    WrongTaskError,
)
from ..api.model_config import GENERATE
from ..api.request import MAX_PRIORITY, MAX_SAMPLES, FinishReason, Output, RequestOptions
from ..api.sampling_params import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, SamplingParams
from ..api.tenants import Tenant
from ..kv_events.feed import KvEventFeed
from ..telemetry.request_log import Observer, RequestLog
from ..text.grammar import Grammars
from ..text.tokenizer import Tokenizer
from .arrivals import Arrivals
from .auth import Access
from .grpc_status import abort, code_of
from .method_permissions import new_access
from .output_queue import OutputQueue, OutputQueues
from .prompt_intake import Intake

MAX_MESSAGE_BYTES = 16 * 2**20  # a prompt of a million tokens takes 3 MB

_MAX_REQUEST_ID_CHARS = 128
_MAX_ABORTS = 1_024
_DEADLINE_SLACK_SECONDS = 0.1  # the caller's clock starts earlier, so its cancellation can come first (2 ms, measured)


@dataclass(frozen=True)
class Asked:
    """A validated and tokenised request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions
    began: float  # start of the call on the monotonic clock
    tenant: Tenant
    count_tokens: Callable[[int], None]  # see `Access.in_flight`


@dataclass(frozen=True)
class Backend:
    """The engine and everything else that the service needs to serve a model."""

    engine: Engine
    tokenizer: Tokenizer
    info: ModelInfo
    grammars: Grammars | None = None  # None: constraints are not supported
    kv_events: KvEventFeed | None = None  # None: changes of the prefix cache are not published


class Accepted:
    """A request that the engine has accepted, until its last output has been taken."""

    def __init__(self, queue: OutputQueue, log: RequestLog, check_end: Callable[[Output], None]):
        self.queue, self.log = queue, log
        self.num_open_samples = queue.num_samples  # whose last output has not been taken
        self.ended = "cancelled"  # how the last of the others did
        self._check_end = check_end

    async def take(self) -> Output:
        """Returns the next output. Raises as `OutputQueue.take`, and what `check_end` raises."""
        output = await self.queue.take()
        if output.finish_reason is not None:
            self.num_open_samples -= 1
            self.ended = output.finish_reason.value
            self._check_end(output)
        return output


class Edge(pb_grpc.InferenceServiceServicer):
    """The InferenceService. Refuses requests until a backend is attached and `accept` is called."""

    def __init__(self, queues: OutputQueues, *, access: Access | None = None, observer: Observer | None = None):
        self.queues = queues
        self.access = access if access is not None else new_access()
        self.observer = observer if observer is not None else Observer()
        self.progress = "the process has begun"  # of the start, for people
        self.max_samples = MAX_SAMPLES  # of a request; set again once the server's limits are known
        self.backend: Backend | None = None
        self.arrivals = Arrivals(lambda is_held: self.backend is not None and self.backend.engine.hold(is_held))
        self._intake: Intake | None = None
        self._refusal: str | None = "the server is starting; wait until its health is SERVING"
        self._state = pb.SERVER_STATE_STARTING
        self._started = time.monotonic()

    def attach(self, backend: Backend) -> None:
        """Sets or replaces the backend. May be called from any thread."""
        self._intake = Intake(backend.tokenizer, backend.info, backend.grammars)
        self.backend = backend

    def accept(self) -> None:
        """Starts to accept requests."""
        assert self.backend is not None, "attach must be called before accept"
        self.progress = ""
        self._refusal = None
        self._state = pb.SERVER_STATE_READY

    def refuse(self, reason: str) -> None:
        """Refuses new requests with UNAVAILABLE and `reason` from now on."""
        self.progress = ""
        self._refusal = reason
        self._state = pb.SERVER_STATE_DRAINING

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """See `engine_api.Engine.cancel`."""
        if self.backend is not None:
            self.backend.engine.cancel(request_id, reason)

    def admit(self, tenant: Tenant) -> None:
        """Checks that another request of the tenant can be queued, and counts its arrival.

        Raises:
          QueueFullError: Requests are accepted, but the queue is full.
        """
        if self._refusal is None and self.backend is not None:
            self.backend.engine.check_room(tenant.name, tenant.weight)
            self.arrivals.begin()

    @property
    def failure(self) -> str | None:
        """Why the engine failed; None while it is healthy."""
        return self.backend.engine.failure if self.backend is not None else None

    @property
    def state(self) -> "pb.ServerState":
        return pb.SERVER_STATE_FAILED if self.failure is not None else self._state

    def serving(self) -> tuple[Backend, Intake]:
        """Returns the backend and its intake.

        Raises:
          EngineStoppedError: No requests are accepted.
        """
        if self._refusal is not None or self.backend is None or self._intake is None:
            raise EngineStoppedError(f"{self._refusal}{f' ({self.progress})' if self.progress else ''}")
        return self.backend, self._intake

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async def prompt(intake: Intake, tenant: str) -> tuple[int, ...]:
            field = request.WhichOneof("prompt")
            if field is None:
                raise InvalidRequestError("prompt", "got neither text nor token_ids; send one of them.")
            if field == "token_ids":
                return intake.checked(field, request.token_ids.token_ids)
            return intake.checked(field, await intake.encode(request.text, tenant))

        await self._answer("Generate", request, prompt, pb.GenerateResponse, context)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:
        async def prompt(intake: Intake, tenant: str) -> tuple[int, ...]:
            return intake.checked("messages", await intake.render(request, tenant))

        await self._answer("Chat", request, prompt, pb.ChatResponse, context)

    async def _answer(
        self,
        method: str,
        request: Any,
        prompt: Callable[[Intake, str], Awaitable[tuple[int, ...]]],
        kind: type[proto_codec.AnswerMessage],
        context: Any,
    ) -> None:
        """Streams one request.

        Writes with `context.write` instead of `yield`, because a suspended generator learns of a caller's departure
        only when it is garbage-collected.
        """

        async def write(output: Output) -> None:
            await context.write(proto_codec.answer(kind, output))

        began = time.monotonic()
        try:
            backend, intake = self.serving()
            backend.info.require(GENERATE)
            request_id = checked_request_id(request.request_id if request.HasField("request_id") else None)
            params = proto_codec.sampling_params(request.sampling, backend.info.default_sampling)
            tenant = self.access.tenant(context.invocation_metadata())
            options = on_behalf_of(tenant, proto_codec.request_options(request, None))
            with self.in_flight(method, request_id, tenant) as count_tokens:
                token_ids = await prompt(intake, tenant.name)
                asked = Asked(request_id, token_ids, params, options, began, tenant, count_tokens)
                await self.stream(method, asked, write, context)
        except Exception as error:  # CancelledError, of a cancelled call, is not an Exception
            await abort(context, error)

    async def embed_tokens(self, method: str, request_id: str, token_ids: Sequence[int], context: Any) -> np.ndarray:
        """Returns the embedding of a text that a gateway has tokenised; see `retrieval.RetrievalEdge`."""
        raise WrongTaskError("this server serves no embedding models.")

    @contextlib.contextmanager
    def in_flight(self, method: str, request_id: str, tenant: Tenant) -> Iterator[Callable[[int], None]]:
        """Counts a call against its tenant's quota; see `Access.in_flight`. A refusal is measured and logged."""
        try:
            with self.access.in_flight(tenant) as count_tokens:
                yield count_tokens
        except QuotaExceededError as error:
            self.observer.refuse(method, request_id, tenant.name, code_of(error).name.lower())
            raise

    async def stream(self, method: str, asked: Asked, write: Callable[[Output], Awaitable[None]], context: Any) -> None:
        """Submits one request and writes its outputs until the last one. Its call is counted by `in_flight`.

        Raises:
          QuotaExceededError: The tenant has too much in flight.
          MeshserveError: Any error of `engine_api.Engine.submit` and `OutputQueue.take`.
        """
        backend, intake = self.serving()  # tokenising may have taken a while
        num_prompt_tokens = len(asked.prompt_token_ids)
        intake.check_params(asked.params, num_prompt_tokens)
        tenant, num_samples, info = asked.tenant, asked.options.n, backend.info
        params, num_tokens = tenant.bounded(asked.params, num_prompt_tokens, num_samples, info.max_context_tokens)
        asked.count_tokens(num_tokens)
        remaining = context.time_remaining()  # None if the call has no deadline
        grammar = await intake.grammar(asked.params, asked.prompt_token_ids, tenant.name, remaining)
        backend, intake = self.serving()  # again, because compiling may have taken a while
        options = dataclasses.replace(asked.options, timeout_seconds=context.time_remaining())

        def submit(name: str) -> None:
            backend.engine.submit(name, asked.prompt_token_ids, params, options, grammar)

        with self.submitted(method, asked, submit, (options.n, num_prompt_tokens), context) as accepted:
            while accepted.num_open_samples:
                output = await accepted.take()
                accepted.log.sent(output)  # before the write: a client that hangs up then cancels the rest of it
                await accepted.queue.handing_over(write(output))

    @contextlib.contextmanager
    def submitted(
        self, method: str, asked: Asked, submit: Callable[[str], None], counts: tuple[int, int], context: Any
    ) -> Iterator[Accepted]:
        """Submits a request, given how to under its name in the engine. When the block ends, so does the request.

        `counts` are its samples and its prompt tokens.
        """
        num_samples, num_prompt_tokens = counts
        queue = self.queues.open(scoped(asked.tenant, asked.request_id), num_samples)
        try:
            submit(queue.request_id)
        except BaseException:
            self.queues.discard(queue)
            raise
        self.arrivals.end()
        request_log = self.observer.begin(
            method=method, request_id=asked.request_id, tenant=asked.tenant.name,
            num_prompt_tokens=num_prompt_tokens, metadata=dict(context.invocation_metadata() or ()), began=asked.began,
        )  # fmt: skip
        accepted, outcome = Accepted(queue, request_log, self._check_end), "cancelled"
        try:
            yield accepted
            outcome = accepted.ended
        except DeadlineError:
            outcome = accepted.ended
            raise
        except Exception as error:
            outcome = code_of(error).name.lower()
            raise
        finally:
            remaining = context.time_remaining()
            is_late = remaining is not None and remaining < _DEADLINE_SLACK_SECONDS
            reason = FinishReason.DEADLINE if is_late else FinishReason.CANCELLED
            self.queues.close(queue, reason)
            request_log.end(reason.value if outcome == "cancelled" else outcome)

    def _check_end(self, output: Output) -> None:
        """Raises if the end of a sample is reported as a status instead of a message."""
        if output.finish_reason is FinishReason.ERROR and self.failure is not None:
            raise failure_error(self.failure)
        if output.finish_reason is FinishReason.DEADLINE:
            raise DeadlineError(output.message)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        try:
            _, intake = self.serving()
            tenant = self.access.tenant(context.invocation_metadata())
            with self.in_flight("Tokenize", "", tenant):
                return await intake.tokenize(request, tenant.name)
        except Exception as error:
            await abort(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        try:
            _, intake = self.serving()
            tenant = self.access.tenant(context.invocation_metadata())
            with self.in_flight("Detokenize", "", tenant):
                return pb.DetokenizeResponse(text=await intake.detokenize(request.token_ids, tenant.name))
        except Exception as error:
            await abort(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        try:
            tenant = self.access.tenant(context.invocation_metadata())
            return pb.AbortResponse(num_aborted=self.abort_requests(request.request_ids, tenant))
        except Exception as error:
            await abort(context, error)

    def abort_requests(self, request_ids: Sequence[str], tenant: Tenant) -> int:
        """Cancels the open requests among these of the tenant, and returns their number.

        Raises:
          InvalidRequestError: There are too many ids.
        """
        if len(request_ids) > _MAX_ABORTS:
            message = f"got {len(request_ids)}; allowed are {_MAX_ABORTS}. Call several times."
            raise InvalidRequestError("request_ids", message)
        found = [name for request_id in set(request_ids) if self.queues.is_open(name := scoped(tenant, request_id))]
        for name in found:
            self.cancel(name, FinishReason.CANCELLED)
        return len(found)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        return proto_codec.model_info_response((await self._known_backend(context)).info)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            state=self.state,
            progress=self.progress,
            uptime_seconds=time.monotonic() - self._started,
            server_version=version("meshserve"),
            num_open_requests=self.queues.num_open,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_chars=MAX_STOP_STRING_CHARS,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return proto_codec.load_response((await self._known_backend(context)).engine.load())

    async def _known_backend(self, context: Any) -> Backend:
        if self.backend is None:
            await abort(context, EngineStoppedError(f"the server is starting ({self.progress})"))
        return self.backend


def checked_request_id(request_id: str | None) -> str:
    """Returns the caller's id of a request, or a new one.

    Raises:
      InvalidRequestError: The id is empty, too long or not printable.
    """
    if request_id is None:
        return uuid.uuid4().hex
    if not 1 <= len(request_id) <= _MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequestError(
            "request_id",
            f"got {request_id[:_MAX_REQUEST_ID_CHARS]!r} of {len(request_id)} characters; allowed are 1 to "
            f"{_MAX_REQUEST_ID_CHARS} printable characters. Leave it out to have the server choose one.",
        )
    return request_id


def scoped(tenant: Tenant, request_id: str) -> str:
    """Returns the request's id inside the server.

    Ids of different tenants never collide, so tenants cannot abort each other's requests, and a caller without a tenant
    cannot use a tenant's ids.
    """
    return f"{tenant.name}/{request_id}" if tenant.name or "/" in request_id else request_id


def on_behalf_of(tenant: Tenant, options: RequestOptions) -> RequestOptions:
    """Returns the options of a tenant's request, with a cache salt of the tenant's own.

    Tenants do not share cached prompts, because the time to the first token would reveal what others have sent.

    Raises:
      InvalidRequestError: The priority is above the tenant's limit.
    """
    limit = tenant.priority_limit
    if options.priority > limit:
        message = f"got {options.priority}; this tenant may use -{MAX_PRIORITY} to {limit} (max_priority). Lower it."
        raise InvalidRequestError("priority", message)
    salt = options.cache_salt
    if tenant.name:
        salt = hashlib.sha256(f"{tenant.name}\0{salt}".encode()).hexdigest()
    return dataclasses.replace(options, cache_salt=salt, tenant=tenant.name, weight=tenant.weight)


def failure_error(failure: str) -> EngineStoppedError:
    """Returns the error that callers get once the engine has failed."""
    return EngineStoppedError(f"the engine failed: {failure}. The server stops; use another one, or retry later")
