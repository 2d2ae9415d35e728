"""Runs the engine loop: plan, dispatch, collect and stream, one step ahead of the device.

Step 8 of 10. In: requests, from any thread. Out: `Output`s, one delivery per step, from the engine's own thread.

While the device runs step k, the host plans and dispatches step k+1, and only then waits for the tokens of step k. The
device therefore always has its next step queued. The cost is that an end which the host cannot foresee (an end token, a
stop string) is seen one step late; that step's token for the request is dropped.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from ..adapters.changes import AdapterChanges
from ..api.adapters import AdapterCatalog, NoAdapters, named_adapter
from ..api.engine_api import Deliver
from ..api.errors import EngineStoppedError, UnavailableFeatureError
from ..api.request import DEFAULT_OPTIONS, FinishReason, Load, Request, RequestOptions
from ..api.sampling_params import SamplingParams
from ..draft.model.proposing_runner import ProposingRunner, propose_and_run
from ..host_cache.host_cache import HostCache
from ..program.batch import BatchBuilder
from ..program.pooled_rows import PooledRows
from ..program.processors.processor_batch import ProcessorBatch
from ..scheduler.adapter_slots import AdapterSlots
from ..scheduler.drafts.model_drafter import fill_unknown
from ..scheduler.page_allocator import PageAllocator
from ..scheduler.scheduler import Scheduler
from ..supervision.supervisor import BackgroundTask, Supervisor
from ..text.tokenizer import TextStream, Tokenizer
from .flight import Flight, Interlude, reason_of
from .logprobs import StepLogprobs
from .new_samples import new_samples
from .output_streams import OpenSamples
from .runner import Runner
from .step_record import Record, StepRecorder

if TYPE_CHECKING:
    from ..text.grammar import Grammar

# More outputs of a step are delivered behind the next dispatch, which the threads that send them would hold up, if
# there is time to send them while the device is busy: `_SEND_SECONDS` for each request.
_MAX_OUTPUTS_AT_ONCE, _SEND_SECONDS = 64, 3e-5


class Engine:
    """Serves requests on one mesh.

    Args:
      scheduler: Plans the steps.
      pages: The page allocator that the scheduler uses.
      batches: Converts plans to host arrays.
      runner: Runs the batches on the device.
      tokenizer: Converts tokens to text. If None, all texts are empty and stop strings are ignored.
      deliver: Receives the outputs of each step, once per step, on the engine's thread. Only the last output of each
        sample has a finish reason. It must not block and must not raise.
      record: Receives a `StepRecord` for each dispatch, under the same conditions.
      clock: Returns monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageAllocator,
        batches: BatchBuilder,
        runner: Runner,
        tokenizer: Tokenizer | None,
        deliver: Deliver,
        record: Record | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._scheduler = scheduler
        self.host_cache = pages.host if isinstance(pages.host, HostCache) else None
        self._pages = pages
        self._batches = batches
        self.runner = runner
        self.adapters: AdapterCatalog = NoAdapters()
        self.adapter_slots: AdapterSlots | None = scheduler.adapters
        self._deliver = deliver
        self._recorder = StepRecorder(scheduler, pages, record) if record is not None else None
        self._clock = clock
        self.draw_seed: Callable[[int], int] = secrets.randbits  # returns a seed of so many bits for a request
        self._open = OpenSamples(scheduler, tokenizer)
        self._flight: Flight | None = None
        self._has_time = False  # see `_SEND_SECONDS`
        self._pause: Interlude | None = None
        self._is_stopping = False
        self.failure: str | None = None  # why the loop failed; None while the engine is healthy
        # Guards everything above except `_flight` and `_has_time`, which only the engine's thread uses. Held for under
        # a millisecond.
        self._changed = threading.Condition()
        self._is_held = False  # see `hold`, which writes it without the lock
        self.is_paused = False  # see `pause`
        self._num_weights = 0  # changes of the weights since the start
        self._delivering = threading.RLock()  # acquired before `_changed`, to deliver outputs in order
        self._task: BackgroundTask | None = None  # the engine's thread

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Starts the engine's thread."""
        self._task = (supervisor or Supervisor()).once("engine", self._run)

    def stop(self) -> None:
        """Ends every open request as cancelled and waits until the loop has ended. Idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._task is not None:
            self._task.join()

    def fail(self, reason: str) -> None:
        """Ends every open request with `reason` at once, and the loop after the current step.

        May be called from any thread. It does not wait for the loop, which may hang in a step that never ends.
        """
        with self._changed:
            self.failure = self.failure or reason
            self._is_stopping = True
            self._open.end_all(FinishReason.ERROR, self._clock(), self.failure)
            self._changed.notify()
        self._flush()

    def check_room(self, tenant: str = "", weight: float = 1.0) -> None:
        """Implements `engine_api.EngineApi.check_room`."""
        if self._scheduler.num_waiting < self._scheduler.limits.max_waiting:
            return  # reads one number without the lock, which a step may hold; `submit` checks again
        with self._changed:
            self._scheduler.check_room(self._clock(), 1, tenant, weight)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        grammar: "Grammar | None" = None,
    ) -> None:
        """Accepts a request, whose outputs are passed to `deliver`. `grammar` is the compiled `params.constraint`.

        Raises:
          InvalidRequestError: The request can never be served, or its id is in use.
          AdapterError: It names an adapter that is not loaded, or has other content than it asks for.
          QueueFullError: The queue is full.
          EngineStoppedError: The engine is stopping or has failed.
        """
        assert (grammar is None) == (params.constraint is None), "pass a grammar with a constraint, and only then"
        samples = self._new_samples(request_id, [tuple(prompt_token_ids)] * options.n, params, options)
        self._scheduler.prepare(samples)  # without the lock, because a long prompt takes a millisecond
        resumed = prompt_token_ids[len(prompt_token_ids) - params.num_resumed_tokens :]
        self._accept(samples, grammar, self._open.text_after(params, resumed))

    def submit_prompts(
        self, request_id: str, prompts: Sequence[Sequence[int]], params: SamplingParams, options: RequestOptions
    ) -> None:
        """Implements `engine_api.EngineApi.submit_prompts`."""
        samples = self._new_samples(request_id, list(map(tuple, prompts)), params, options)
        for sample in samples:
            self._scheduler.prepare([sample])
        self._accept(samples, None, None)

    def _accept(self, samples: list[Request], grammar: "Grammar | None", text: TextStream | None) -> None:
        with self._changed:
            if self.failure is not None:
                raise EngineStoppedError(f"the engine has failed: {self.failure}")
            if self._is_stopping:
                raise EngineStoppedError("the engine is stopping; send the request to another server.")
            self._open.check_new(samples[0].request_id)
            self._scheduler.add(*samples)
            self._open.add(samples, grammar, text)
            if not self._is_held:
                self._changed.notify()

    def hold(self, is_held: bool) -> bool:
        """Implements `engine_api.EngineApi.hold`."""
        self._is_held = is_held and not self._scheduler.has_work  # reads a length, without the lock
        if not is_held:
            with self._changed:
                self._changed.notify()
        return self._is_held

    def _new_samples(
        self, request_id: str, prompts: Sequence[tuple[int, ...]], params: SamplingParams, options: RequestOptions
    ) -> list[Request]:
        adapter = named_adapter(self.adapters, options.adapter, options.adapter_digest)
        seed = self.draw_seed(63) if params.seed is None else params.seed
        return new_samples(request_id, prompts, params, options, seed=seed, now=self._clock(), adapter=adapter)

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Ends all samples of a request and frees their pages at once. Unknown and ended requests are ignored."""
        with self._changed:
            for sample in self._open.of(request_id):
                if self._open.end(sample, reason, self._clock()):
                    self._changed.notify()

    def load(self) -> Load:
        """Returns the current load."""
        with self._changed:
            return Load(
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                num_pages=self._pages.num_pages,
                num_free_pages=self._pages.num_free_pages,
            )

    def flush_prefix_cache(self) -> int:
        """Drops all evictable pages from the prefix cache and returns their number."""
        with self._changed:
            return self._pages.flush()

    def rebuild(self, make_runner: Callable[[], tuple[Runner, int]]) -> None:
        """Replaces the runner between two steps, and waits until it is replaced.

        Running requests lose their pages and recompute their tokens afterwards. New requests are accepted throughout.

        Args:
          make_runner: Creates the runner with an empty cache, and returns it and its number of pages. Runs on the
            engine's thread. If it raises, the engine fails, because the old runner's state may be lost.

        Raises:
          EngineStoppedError: The engine is not running, or is already being rebuilt.
          Exception: Whatever `make_runner` raises.
        """

        def replace() -> None:
            with self._changed:
                self._scheduler.preempt_all()
            runner, num_pages = make_runner()
            with self._changed:
                self.runner = runner
                self._pages.reset(num_pages)
                if self.adapter_slots is not None:
                    self.adapter_slots.reset()
                self._end_too_large()

        self.between_steps(replace)

    @property
    def weight_version(self) -> str:
        """The version of the weights that compute the next tokens."""
        return self._open.weight_version

    def begin_weights(self, version: str, *, aborting: str = "") -> None:
        """Notes, between two steps, that other weights compute the next tokens. No page of before is found any more.

        Unfinished requests recompute theirs; or, with the message `aborting`, they end with the tokens that they have.
        """
        with self._changed:
            if aborting:
                self.end_open(aborting)
            self._num_weights += 1
            self._scheduler.begin_weights(hashlib.sha256(f"{self._num_weights}\0{version}".encode()).digest())
            self._pages.flush()
            self._open.begin_version(version)

    def end_open(self, message: str) -> None:
        """Ends all unfinished requests as cancelled, with a message and the tokens that they have."""
        with self._changed:
            for sample in self._open.unfinished:
                self._open.end(sample, FinishReason.CANCELLED, self._clock(), message)
            self._changed.notify()

    def pause(self, is_paused: bool) -> None:
        """Stops the steps, after the one in flight, or lets them go on. Requests are accepted, and wait."""
        with self._changed:
            self.is_paused = is_paused
            self._changed.notify()

    def between_steps(self, action: Callable[[], None], *, after_open: bool = False) -> None:
        """Runs `action` on the engine's thread while no step is in flight, and waits for it.

        With `after_open`, open requests end first, and new ones wait. If the action raises, the engine fails.

        Raises:
          EngineStoppedError: The engine is not running, or is already pausing for another action.
          UnavailableFeatureError: Open requests are to end first, and the engine is paused.
          Exception: Whatever `action` raises.
        """
        pause = Interlude(action, after_open)
        with self._changed:
            is_running = self._task is not None and self._task.is_alive and not self._is_stopping
            if not is_running or self.failure is not None or self._pause is not None:
                raise EngineStoppedError("the engine is not running, is being changed, or is being profiled.")
            if after_open and self.is_paused and self._scheduler.has_work:
                raise UnavailableFeatureError("the engine is paused: open requests cannot end. Abort or continue them.")
            self._scheduler.hold_new(after_open)
            self._pause = pause
            self._changed.notify()
        pause.done.result()

    def _run_pause(self, pause: Interlude) -> None:
        if self._flight is not None:
            self._complete(self._flight, self._collect(self._flight))
            self._flight = None
        self._flush()
        pause.action()
        with self._changed:
            self._pause = None
            self._scheduler.hold_new(False)
        pause.done.set_result(None)

    def _end_too_large(self) -> None:
        """Ends the requests that do not fit in the whole cache."""
        num_pages = self._pages.num_pages
        for request in tuple(self._scheduler.requests):
            if self._scheduler.limits.num_needed_pages(request) > num_pages:
                message = f"the cache was rebuilt with {num_pages} pages, too few for this request"
                self._open.end(request, FinishReason.ERROR, self._clock(), message)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self._is_due(self._pause):
                    self._run_pause(self._pause)
                else:
                    self._step()
        except BaseException as error:  # any failure, also a panic in a library, must end every open request
            with self._changed:
                self.failure = self.failure or reason_of(error)
                self._open.end_all(FinishReason.ERROR, self._clock(), self.failure)
                self._refuse_pause(error)
            raise  # to the supervisor, which logs and counts it
        else:
            with self._changed:
                self._open.end_all(FinishReason.CANCELLED, self._clock(), "the server is stopping")
                self._refuse_pause(EngineStoppedError("the engine is stopping."))
        finally:
            self._flush()

    def _refuse_pause(self, error: BaseException) -> None:
        """Fails what is to be done between two steps with `error`."""
        if self._pause is not None:
            self._pause.done.set_exception(error)

    def _is_due(self, pause: Interlude | None) -> TypeGuard[Interlude]:
        return pause is not None and not (pause.after_open and self._scheduler.has_work)

    def _wait_for_work(self) -> bool:
        """Waits until there is work. Returns False when the engine is to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_stopping
                    or self._is_due(self._pause)
                    or (self._scheduler.has_work and not self._is_held and not self.is_paused)
                    or (self.host_cache is not None and self.host_cache.is_behind)
                    or self._flight
                    or self._open.num_outputs
                    or self._open.constrained.has_work
                )
            )
            return not self._is_stopping

    def _step(self) -> None:
        """Dispatches the next step, then collects the previous one.

        The token masks of constrained requests depend on the collected tokens. Steps with such requests are therefore
        dispatched in two parts, and the masks are computed while the device runs the first. A request whose mask is
        late is withdrawn from the step and sits out until it comes, so that no other request waits for it.
        """
        flight, processors = self._dispatch() or (None, None)
        self._flush()
        if self._flight is not None:
            seconds = self._collect(self._flight)
            if flight is None and not self._open.constrained.has_work:
                flight, processors = self._dispatch() or (None, None)  # all waited for the tokens of drafts
            self._complete(self._flight, seconds)
        elif flight is None and self.host_cache is not None:
            self.host_cache.wait()
        flight = self._renew_masks(flight, processors, is_idle=flight is None and self._flight is None)
        if flight is not None and processors is not None:
            flight = self._control(flight, processors)
        self._flight = flight
        if flight is None or self._open.num_outputs <= _MAX_OUTPUTS_AT_ONCE or not self._has_time:
            self._flush()

    def _dispatch(self) -> tuple[Flight, ProcessorBatch | None] | None:
        """Plans and dispatches a step; None if there is nothing to do.

        Also returns the logits processors that remain to be dispatched with `_control`, if any.
        """
        with self._changed:
            started = self._clock()
            for arrival in self.host_cache.arrivals(started) if self.host_cache is not None else ():
                self._scheduler.arrived(*arrival)
            plan = self._scheduler.plan(started) if not self.is_paused else None
            for request in self._scheduler.take_expired():
                self._open.expired(request, "its deadline passed or could no longer be met")
            copies = self.host_cache.take_commands(started, plan) if self.host_cache is not None else ()
            adapters = AdapterChanges.of(self.adapter_slots, plan) if self.adapter_slots is not None else None
            if plan is not None:
                chain, speculation = plan.draft_chain(self._scheduler.limits.draft_tokens), self._scheduler.speculation
                if isinstance(self.runner, ProposingRunner) and self.runner.prepare(
                    plan, chain, self._batches, is_drafting=speculation.is_drafting
                ):
                    speculation.exclude(plan)
                proposing = self._batches.build(chain) if chain is not None else None
                batch = self._batches.build(plan)
                dispatched = self._clock()
                record = self._recorder.planned(plan, batch.bucket, dispatched - started) if self._recorder else None
        for command in copies:
            self.runner.copy_pages(command)
        if adapters is not None:
            self.runner.change_adapters(adapters)
        if plan is None:
            return None
        for page_row in batch.page_table_rows:
            self.runner.set_page_row(page_row)
        if proposing is not None:
            assert isinstance(self.runner, ProposingRunner), self.runner
            sampled, proposed = propose_and_run(self.runner, plan, proposing, batch)
        else:
            sampled, proposed = self.runner.run(batch.bucket, batch.packed), None
        flight = Flight(plan, sampled, dispatched, record, proposed=proposed)
        if batch.processors is None or any(request.is_constrained for request in plan.requests):
            return flight, batch.processors
        return self._control(flight, batch.processors), None

    def _control(self, flight: Flight, processors: ProcessorBatch) -> Flight:
        """Dispatches the logits processors and log-probabilities of a step; returns it with the tokens sampled last."""
        for slot in processors.slots:
            self.runner.set_slot_adjustments(*slot)
        tokens, sampled, prompt = flight.sampled, None, None
        if processors.packed is not None:
            plan, withdrawn = flight.plan, flight.num_valid
            masks, unmasked = self._open.constrained.token_masks(plan.requests, plan.drafts)
            flight = replace(flight, num_valid={**unmasked, **withdrawn})
            for index, num_valid in flight.num_valid.items():
                processors.withdraw(plan.sample_rows[index][num_valid:])
            tokens, sampled = self.runner.sample(processors.packed, masks)
        if processors.prompt_targets is not None:
            prompt = self.runner.prompt_logprobs(processors.prompt_targets)
        logprobs = StepLogprobs(flight.plan, sampled, prompt, processors.prompt_targets)
        return replace(flight, sampled=tokens, logprobs=logprobs)

    def _collect(self, flight: Flight) -> float:
        """Waits for the tokens of a dispatch, books them and adds them to the outputs. Returns the step's seconds."""
        plan, began = flight.plan, self._clock()
        tokens, pooled = np.asarray(flight.sampled), None
        self._has_time = self._clock() - began > _SEND_SECONDS * plan.num_requests
        if flight.proposed is not None:
            fill_unknown(plan.drafts, np.asarray(flight.proposed).tolist())
        if tokens.dtype == np.float32:
            pooled = PooledRows(plan, tokens)
            tokens = pooled.tokens
        sampled = tokens.reshape(plan.num_steps, -1)[:, : plan.num_samples].tolist()
        if flight.logprobs is not None:
            flight.logprobs.wait()
        with self._changed:
            now = self._clock()
            self._open.stream_prompts(flight.logprobs)
            for step, booked in enumerate(self._scheduler.speculation.accept(plan, sampled, now, flight.num_valid)):
                for progress in self._scheduler.account(plan, booked, now, step):
                    self._open.stream(progress, now, flight.logprobs, pooled)
            if self.host_cache is not None:
                self.host_cache.collected(plan, flight.dispatched, now)
        return now - flight.dispatched

    def _complete(self, flight: Flight, step_seconds: float) -> None:
        """Completes the record of a collected step, behind the dispatch of the next, for which a device may wait."""
        if self._recorder is not None and flight.record is not None:
            with self._changed:
                self._recorder.collected(flight.record, step_seconds)

    def _renew_masks(self, flight: Flight | None, processors: ProcessorBatch | None, *, is_idle: bool) -> Flight | None:
        """Fetches the token masks of constrained requests, and withdraws those without one from the step."""
        constrained = self._open.constrained
        if not constrained.has_work and (flight is None or processors is None):
            return flight
        renewal = constrained.renew_masks(is_idle=is_idle)  # without the lock, because it waits
        with self._changed:
            now = self._clock()
            for request, end in renewal.ended:
                self._open.end_constrained(request, end, now)
            for request in renewal.ready:
                self._scheduler.set_blocked(request, False)
            for request in renewal.late:
                self._scheduler.set_blocked(request, True)
            requests = flight.plan.requests if flight is not None else ()
            withdrawn = [
                index for index, request in enumerate(requests) if request.is_blocked and not request.is_finished
            ]
            for index in withdrawn:
                self._scheduler.withdraw(requests[index])
            for request in requests:
                if request.num_pending_tokens and constrained.is_slow(request):
                    self._scheduler.set_blocked(request, True)  # the next step would only wait for its mask
        return flight and replace(flight, num_valid=dict.fromkeys(withdrawn, 0))

    def _flush(self) -> None:
        with self._delivering:
            with self._changed:
                outputs = self._open.take_outputs()
            if outputs:
                self._deliver(outputs)
