"""Runs a server on a loopback port, with a fake engine whose tokens are easy to predict.

Token i of a request is (last prompt token + 1 + i) modulo the vocabulary, and its text is the number and a space.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshserve.runtime.api.adapters import AdapterCatalog, NoAdapters
from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import FinishReason, Load, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen, ServerHandle, run_server
from meshserve.runtime.server.method_permissions import new_access
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.telemetry.logs import is_worth_a_line
from meshserve.runtime.text.grammar import Grammar, Grammars
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.waiting import WAIT_SECONDS

VOCAB_SIZE = 128
MAX_CONTEXT_TOKENS = 64
INFO = ModelInfo(
    name="toy",
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    max_context_tokens=MAX_CONTEXT_TOKENS,
    eos_token_ids=(0, 5),
    tp_size=2,
    dtype="bfloat16",
    page_size_tokens=16,
    num_parameters=2**33,
    num_devices=2,
    device_kind="cpu",
    server_version="0.1.0",
    supports_chat=True,
)
LISTEN = Listen(drain_seconds=WAIT_SECONDS)  # an upper bound; draining ends with the last request


class Letters:
    """A tokenizer with one token per ASCII character."""

    max_token_chars = 200
    chat_template = ""

    def token_id(self, text: str) -> int | None:
        return None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode("ascii", "replace"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("ascii", "replace")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool = True, **rest: Any) -> str:
        if any(message["role"] == "alien" for message in messages):
            raise InvalidRequestError("messages", "the chat template refused them: no aliens")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text = text if enable_thinking else text + "no thinking\n"
        return text + "".join(f"{name[:3]}={value}\n" for name, value in sorted(rest.items()))


@dataclass
class Job:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    num_output: int = 0


@dataclass
class FakeEngine:
    """Gives each open request one token per step, up to max_tokens or the context; all its samples are equal.

    A request for which `is_held` is true gets none, so it stays open, however slow the machine is.
    """

    deliver: Callable[[list[Output]], None]
    step_seconds: float = 0.002
    is_held: Callable[[Job], bool] = lambda job: False
    text: Callable[[int], str] = "{} ".format
    is_full: bool = False
    submit_error: Exception | None = None
    failure: str | None = None
    cancels: list[tuple[str, FinishReason]] = field(default_factory=list)
    can_be_held: bool = False
    holds: list[tuple[bool, int]] = field(default_factory=list)  # arguments of `hold`, and the requests until then
    num_submits: int = 0
    ends: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    num_samples: dict[str, int] = field(default_factory=dict)
    salts: list[str] = field(default_factory=list)
    options: list[RequestOptions] = field(default_factory=list)
    grammars: list[Grammar | None] = field(default_factory=list)
    pending: list[Output] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_running: bool = True
    adapters: AdapterCatalog = field(default_factory=NoAdapters)

    def check_room(self, tenant: str = "", weight: float = 1.0) -> None:
        if self.is_full:
            raise QueueFullError("9 requests wait; this server queues 9 (max_waiting). Retry later.", 2.5)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        grammar: Grammar | None = None,
    ) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        with self.lock:
            assert request_id not in self.jobs
            self.num_samples[request_id] = options.n
            self.jobs[request_id] = Job(request_id, prompt_token_ids, params)
            self.num_submits += 1
            self.salts.append(options.cache_salt)
            self.options.append(options)
            self.grammars.append(grammar)

    def hold(self, is_held: bool) -> bool:
        self.holds.append((is_held, self.num_submits))
        return is_held and self.can_be_held

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        with self.lock:
            self.cancels.append((request_id, reason))
            if (job := self.jobs.pop(request_id, None)) is not None:
                self.pending.append(self.last(job, reason))

    def load(self) -> Load:
        with self.lock:
            return Load(num_running=len(self.jobs), num_waiting=1, num_pages=100, num_free_pages=90)

    def flush_prefix_cache(self) -> int:
        return 7

    def between_steps(self, action: Callable[[], None]) -> None:
        action()

    def last(self, job: Job, reason: FinishReason, **rest: Any) -> Output:
        self.ends.append(job.request_id)
        usage = {"num_prompt_tokens": len(job.prompt), "num_output_tokens": job.num_output}
        return Output(request_id=job.request_id, finish_reason=reason, **usage, **rest)

    def run(self) -> None:
        while self.is_running and self.failure is None:
            with self.lock:
                outputs, self.pending = self.pending, []
                outputs += [self.advance(job) for job in list(self.jobs.values()) if not self.is_held(job)]
                outputs = [
                    replace(output, index=index)
                    for output in outputs
                    for index in range(self.num_samples[output.request_id])
                ]
            if outputs:
                self.deliver(outputs)
            time.sleep(self.step_seconds)

    def advance(self, job: Job) -> Output:
        token_id = (job.prompt[-1] + 1 + job.num_output) % VOCAB_SIZE
        job.num_output += 1
        new = {"token_ids": (token_id,), "text": self.text(token_id)}
        if job.num_output < (job.params.max_tokens or MAX_CONTEXT_TOKENS - len(job.prompt)):
            return Output(request_id=job.request_id, **new)
        del self.jobs[job.request_id]
        return self.last(job, FinishReason.LENGTH, **new)

    @contextlib.contextmanager
    def holding(self, max_tokens: int) -> Iterator[None]:
        """Gives requests with this `max_tokens` only their first token until the block ends."""
        self.is_held, before = lambda job: job.params.max_tokens == max_tokens and job.num_output > 0, self.is_held
        try:
            yield
        finally:
            self.is_held = before

    def end(self, reason: FinishReason, message: str) -> None:
        """Ends every open request from within, like a running engine that gives one up."""
        with self.lock:
            self.pending += [self.last(job, reason, message=message) for job in self.jobs.values()]
            self.jobs.clear()


@functools.cache
def demo_grammars() -> Grammars:
    """Compiles grammars for a different vocabulary than the engine's, which makes no difference to it."""
    return Grammars(DEMO_DIRECTORY / "tokenizer.json", 2048, (0, 2))


def edge_of(engine: FakeEngine, room: OutputQueues, tokens: Path | None = None) -> Edge:
    edge = Edge(room, access=new_access(tokens))
    edge.attach(Backend(engine, Letters(), INFO, demo_grammars()))  # type: ignore[arg-type]
    return edge


@dataclass
class Running:
    room: OutputQueues
    handle: ServerHandle
    edge: Edge
    target: str
    errors: list[BaseException]
    thread: threading.Thread

    @property
    def engine(self) -> FakeEngine:
        assert self.edge.backend is not None and isinstance(self.edge.backend.engine, FakeEngine)
        return self.edge.backend.engine

    def counted(self, name: str, **labels: str) -> float:
        """Returns the present value of a metric that exists."""
        value = self.edge.observer.metrics.registry.get_sample_value(name, labels)
        assert value is not None, (name, labels)
        return value

    def stop(self) -> None:
        self.handle.request_stop()
        self.join()

    def join(self) -> None:
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(edge: Edge, room: OutputQueues, listen: Listen = LISTEN) -> Iterator[Running]:
    """Serves `edge` until the block ends."""
    handles: list[ServerHandle] = []
    errors: list[BaseException] = []
    ready = threading.Event()

    def serve() -> None:
        try:
            run_server(edge, listen, on_ready=lambda handle: (handles.append(handle), ready.set()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(WAIT_SECONDS), errors
    try:
        yield Running(room, handles[0], edge, f"127.0.0.1:{handles[0].port}", errors, thread)
    finally:
        handles[0].request_stop()
        handles[0].request_stop()  # the second request stops without draining
        thread.join(WAIT_SECONDS)


@contextlib.contextmanager
def running(
    *, max_undelivered_tokens: int = 2**20, tokens: Path | None = None, listen: Listen = LISTEN, **options: Any
) -> Iterator[Running]:
    """Runs a server until the block ends, by default with a large buffer for slow readers; `options` go to
    FakeEngine.
    """
    room = OutputQueues(max_undelivered_tokens=max_undelivered_tokens)
    engine = FakeEngine(room.deliver, **options)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        with serving(edge_of(engine, room, tokens), room, listen) as server:
            yield server
    finally:
        engine.is_running = False
        thread.join(WAIT_SECONDS)


def logged_errors(records: Sequence[logging.LogRecord]) -> list[logging.LogRecord]:
    """Returns the records that an operator would see as an error.

    Excludes messages of the poller that grpc.aio uses for all event loops of a process: it complains if it tries to
    wake a loop that an earlier test has closed. A server has only one loop.
    """
    errors = [record for record in records if record.levelno >= logging.ERROR and is_worth_a_line(record)]
    return [record for record in errors if "PollerCompletionQueue" not in record.getMessage()]
