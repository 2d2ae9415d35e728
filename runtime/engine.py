"""The loop: plan, dispatch, collect, stream; one step ahead of the device.

Step 8 of 10. In: requests, from any thread. Out: `Output`s, one delivery a step, from the engine's own thread.

While the device runs step k the host plans and dispatches step k+1, and only then waits for the tokens of step k. So
the device always has its next step queued, at the price that an end the host could not foresee (an end token, a stop
string) is seen one step late: that step's token for the request is dropped.
"""

import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from .batch import BatchBuilder, Bucket
from .contract import Deliver
from .errors import EngineStoppedError
from .pages import PageAllocator
from .request import FinishReason, Load, Output, Request, SamplingParams
from .scheduler import Progress, Scheduler, StepPlan
from .tokenizer import TextStream, Tokenizer

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Dispatches a step and returns its tokens, which may still be on their way (`step.StepRunner`)."""

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray: ...


@dataclass(frozen=True)
class _Flight:
    """A dispatched step whose tokens the host has not seen."""

    plan: StepPlan
    sampled: jax.Array | np.ndarray


class Engine:
    """Serves requests on one mesh.

    Args:
      scheduler, pages: the queues and the pages they share.
      batches: makes host arrays of plans.
      runner: runs them.
      tokenizer: turns tokens into text; None leaves every text empty and honours no stop strings.
      deliver: gets the outputs of each step, once a step, on the engine's thread. Each accepted request's last output,
        and only that one, has a finish reason. It must not block, and must not raise.
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
    ):
        self._scheduler = scheduler
        self._pages = pages
        self._batches = batches
        self.runner = runner
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._texts: dict[str, TextStream] = {}
        self._outputs: list[Output] = []
        self._flight: _Flight | None = None
        self._is_stopping = False
        self.failure: str | None = None  # why the loop died
        # Guards everything above but the flight, which is the thread's own. Held for fractions of a millisecond.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends every open request as cancelled and waits for the loop to end. Idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Accepts a request; its outputs come through `deliver`.

        Raises:
          InvalidRequestError: it can never be served, or its id is in use.
          QueueFullError: too many wait.
          EngineStoppedError: the engine is stopping or has failed.
        """
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(request_id=request_id, prompt_token_ids=tuple(prompt_token_ids), params=params, seed=seed)
        with self._changed:
            if self.failure is not None:
                raise EngineStoppedError(f"the engine has failed: {self.failure}")
            if self._is_stopping:
                raise EngineStoppedError("the engine is stopping; send the request to another server.")
            self._scheduler.add(request)
            if self._tokenizer is not None:
                self._texts[request_id] = TextStream(self._tokenizer, params.stop)
            self._changed.notify()

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request; its pages are free at once. One that is unknown or has ended is left alone."""
        with self._changed:
            request = self._scheduler.requests.get(request_id)
            if request is not None and self._scheduler.finish(request, reason):
                self._end(request)
                self._changed.notify()

    def load(self) -> Load:
        with self._changed:
            return Load(
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting,
                num_pages=self._pages.num_pages,
                num_free_pages=self._pages.num_free_pages,
            )

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
        except Exception as error:  # whatever it was, every open request must hear of it
            _log.exception("the engine loop died")
            with self._changed:
                self.failure = f"{type(error).__name__}: {error}"
                self._end_all(FinishReason.ERROR, self.failure)
        else:
            with self._changed:
                self._end_all(FinishReason.CANCELLED, "the server is stopping")
        self._flush()

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False when it is time to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or self._scheduler.has_work or self._flight or self._outputs
            )
            return not self._is_stopping

    def _step(self) -> None:
        """Dispatches the next step, then collects the one before."""
        with self._changed:
            plan = self._scheduler.plan()
            batch = self._batches.build(plan) if plan is not None else None
        flight = None
        if plan is not None and batch is not None:
            flight = _Flight(plan, self.runner.run(*batch))
        if self._flight is not None:
            self._collect(self._flight)
        self._flight = flight
        self._flush()

    def _collect(self, flight: _Flight) -> None:
        """Waits for a step's tokens and books them."""
        sampled = np.asarray(flight.sampled)[: len(flight.plan.chunks)].tolist()
        with self._changed:
            for progress in self._scheduler.account(flight.plan, sampled):
                self._stream(progress)

    def _stream(self, progress: Progress) -> None:
        """Turns a request's new token into an output; a stop string in its text ends it."""
        request, token_id = progress
        token_ids = () if token_id is None else (token_id,)
        text = ""
        stream = self._texts.get(request.request_id)
        if stream is not None:
            text, has_stopped = stream.push(token_ids)
            if has_stopped:
                if not self._scheduler.finish(request, FinishReason.STOP):
                    request.finish_reason = FinishReason.STOP  # it reached its length with this very token
        if request.is_finished:
            self._end(request, token_ids=token_ids, text=text)
        else:
            self._outputs.append(Output(request_id=request.request_id, token_ids=token_ids, text=text))

    def _end(self, request: Request, *, token_ids: tuple[int, ...] = (), text: str = "", message: str = "") -> None:
        """Queues a finished request's last output: all text that was held back comes with it."""
        stream = self._texts.pop(request.request_id, None)
        self._outputs.append(
            Output(
                request_id=request.request_id,
                token_ids=token_ids,
                text=text + (stream.flush() if stream is not None else ""),
                finish_reason=request.finish_reason,
                message=message,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=len(request.output_token_ids),
            )
        )

    def _end_all(self, reason: FinishReason, message: str) -> None:
        for request in list(self._scheduler.requests.values()):
            self._scheduler.finish(request, reason)
            self._end(request, message=message)

    def _flush(self) -> None:
        with self._changed:
            outputs, self._outputs = self._outputs, []
        if outputs:
            self._deliver(outputs)
