"""Admits requests, submits them and hands out their outputs, whatever protocol they came by. Steps 1 and 10 of 10.

In: checked requests of `inference_service` (gRPC) and other fronts. Out: the outputs of the engine, one at a time. Does
not import jax: the engine is anything that implements `engine_api.EngineApi`. All code here runs on one event loop; the
engine's thread reaches it only through `OutputQueues.deliver`. `auth` decides who may call, and `prompt_intake`
converts requests to tokens.
"""

import contextlib
import dataclasses
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshserve.protos import inference_pb2 as pb

from ..api.engine_api import EngineApi, ModelInfo
from ..api.errors import DeadlineError, EngineStoppedError, InvalidRequestError, QuotaExceededError
from ..api.request import MAX_PRIORITY, MAX_SAMPLES, FinishReason, Output, RequestOptions
from ..api.sampling_params import SamplingParams
from ..api.tenants import Tenant
from ..retrieval.embedding_defaults import EmbeddingDefaults
from ..supervision.supervisor import Supervisor
from ..telemetry.kv_events.feed import KvEventFeed
from ..telemetry.request_log import Observer, RequestLog
from ..text.grammar import Grammars
from ..text.tokenizer import Tokenizer
from .adapter_choice import chosen_adapter
from .arrivals import Arrivals
from .auth import Access
from .grpc_status import code_of
from .method_permissions import new_access
from .output_queue import OutputQueue, OutputQueues
from .prompt_intake import Intake

if TYPE_CHECKING:
    from ..weight_updates.engine_control import EngineControl
    from ..weight_updates.weight_updater import WeightUpdater

_MAX_REQUEST_ID_CHARS = 128
_MAX_ABORTS = 1_024
_DEADLINE_SLACK_SECONDS = 0.1  # the caller's clock starts earlier, so its cancellation can come first (2 ms, measured)


# Submits a request under its name in the engine.
Submit = Callable[[str, RequestOptions], None]


class Call(Protocol):
    """The call by which a request came. A `grpc.aio.ServicerContext` is one."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""

    def invocation_metadata(self) -> Any:
        """Pairs of names and values: headers of the call."""


@dataclass(frozen=True)
class CheckedRequest:
    """A validated and tokenised request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions
    began: float  # start of the call on the monotonic clock
    tenant: Tenant
    count_tokens: Callable[[int], None]  # see `Access.in_flight`
    on_adapter: Callable[[str], None] = lambda digest: None  # called with the digest of its adapter once it is accepted


@dataclass(frozen=True)
class Backend:
    """The engine and everything else that the service needs to serve a model."""

    engine: EngineApi
    tokenizer: Tokenizer
    info: ModelInfo
    grammars: Grammars | None = None  # None: constraints are not supported
    kv_events: KvEventFeed | None = None  # None: changes of the prefix cache are not published
    embedding: EmbeddingDefaults = EmbeddingDefaults()
    weights: "WeightUpdater | None" = None  # replaces the weights
    control: "EngineControl | None" = None  # pauses the engine


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


class Edge:
    """What every front of the server shares. Refuses requests until a backend is attached and `accept` is called."""

    def __init__(
        self,
        queues: OutputQueues,
        *,
        access: Access | None = None,
        observer: Observer | None = None,
        supervisor: Supervisor | None = None,
    ):
        self.queues = queues
        self.access = access if access is not None else new_access()
        self.observer = observer if observer is not None else Observer()
        self.observer.metrics.adapters.hides_names = lambda: self.access.limits_adapters
        self.supervisor = supervisor if supervisor is not None else Supervisor()
        self.progress = "the process has begun"  # progress of the start, for people
        self.max_samples = MAX_SAMPLES  # per request; set again once the server's limits are known
        self.adapter_roots: tuple[Path, ...] = ()  # below which operators may load adapters; set by the server
        self.weights_below: tuple[str, ...] = ()  # directories below which new weights may lie
        self.backend: Backend | None = None
        self.arrivals = Arrivals(lambda is_held: self.backend is not None and self.backend.engine.hold(is_held))
        self._intake: Intake | None = None
        self._refusal: str | None = "the server is starting; wait until its health is SERVING"
        self._state = pb.SERVER_STATE_STARTING
        self.started = time.monotonic()

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
        """See `engine_api.EngineApi.cancel`."""
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

    @property
    def unready_reason(self) -> str:
        """Why a server that accepts requests is not ready: a background task cannot run, or the engine sleeps."""
        control = self.backend.control if self.backend is not None else None
        return self.supervisor.problem or (control.unready_reason if control is not None else "")

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted, all background tasks run, and the engine does not sleep."""
        return self.state == pb.SERVER_STATE_READY and not self.unready_reason

    def serving(self) -> tuple[Backend, Intake]:
        """Returns the backend and its intake.

        Raises:
          EngineStoppedError: No requests are accepted.
        """
        if self._refusal is not None or self.backend is None or self._intake is None:
            raise EngineStoppedError(f"{self._refusal}{f' ({self.progress})' if self.progress else ''}")
        return self.backend, self._intake

    @contextlib.contextmanager
    def in_flight(self, method: str, request_id: str, tenant: Tenant) -> Iterator[Callable[[int], None]]:
        """Counts a call against its tenant's quota; see `Access.in_flight`. A refusal is measured and logged."""
        try:
            with self.access.in_flight(tenant) as count_tokens:
                yield count_tokens
        except QuotaExceededError as error:
            self.observer.refuse(method, request_id, tenant.name, code_of(error).name.lower())
            raise

    async def stream(
        self, method: str, asked: CheckedRequest, write: Callable[[Output], Awaitable[None]], call: Call
    ) -> None:
        """Submits one request and writes its outputs until the last one. Its call is counted by `in_flight`.

        Raises:
          QuotaExceededError: The tenant has too much in flight.
          MeshserveError: Any error of `engine_api.EngineApi.submit` and `OutputQueue.take`.
        """
        backend, intake = self.serving()  # tokenising may have taken a while
        num_prompt_tokens = len(asked.prompt_token_ids)
        intake.check_params(asked.params, num_prompt_tokens)
        tenant, num_samples, info = asked.tenant, asked.options.n, backend.info
        params, num_tokens = tenant.bounded(asked.params, num_prompt_tokens, num_samples, info.max_context_tokens)
        asked.count_tokens(num_tokens)
        remaining = call.time_remaining()  # None if the call has no deadline
        grammar = await intake.grammar(asked.params, asked.prompt_token_ids, tenant.name, remaining)
        backend, intake = self.serving()  # again, because compiling may have taken a while

        def submit(name: str, options: RequestOptions) -> None:
            backend.engine.submit(name, asked.prompt_token_ids, params, options, grammar)

        with self.submitted(method, asked, submit, (num_samples, num_prompt_tokens), call) as accepted:
            while accepted.num_open_samples:
                output = await accepted.take()
                accepted.log.sent(output)  # before the write: a client that hangs up then cancels the rest of it
                await accepted.queue.handing_over(write(output))

    @contextlib.contextmanager
    def submitted(
        self, method: str, asked: CheckedRequest, submit: Submit, counts: tuple[int, int], call: Call
    ) -> Iterator[Accepted]:
        """Submits a request, given how to. When the block ends, so does the request.

        `counts` are its samples and its prompt tokens.

        Raises:
          AdapterError: The request names an adapter that it cannot have.
        """
        num_samples, num_prompt_tokens = counts
        backend, _ = self.serving()
        adapter = chosen_adapter(backend.engine.adapters, asked.tenant, asked.options)
        digest = adapter.digest if adapter is not None else ""
        options = dataclasses.replace(asked.options, timeout_seconds=call.time_remaining(), adapter_digest=digest)
        queue = self.queues.open(scoped(asked.tenant, asked.request_id), num_samples)
        try:
            submit(queue.request_id, options)
        except BaseException:
            self.queues.discard(queue)
            raise
        self.arrivals.end()
        if adapter is not None:
            asked.on_adapter(digest)
        request_log = self.observer.begin(
            method=method, request_id=asked.request_id, tenant=asked.tenant.name,
            num_prompt_tokens=num_prompt_tokens, metadata=dict(call.invocation_metadata() or ()), began=asked.began,
            adapter=options.adapter,
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
            remaining = call.time_remaining()
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

    def abort_all(self) -> int:
        """Cancels all open requests of all tenants, and returns their number."""
        names = self.queues.open_ids
        for name in names:
            self.cancel(name, FinishReason.CANCELLED)
        return len(names)


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
