"""Step 9 of 10: from the engine's thread to the streams. In: outputs of a step. Out: one output for each wake-up.

The engine delivers once per step, which wakes the event loop once and not once per token. Each open request has an
`OutputQueue`; its handler takes all queued outputs as one, so a busy loop sends fewer and larger messages. The queue
also limits slow readers, because gRPC's flow control blocks only after megabytes of unread tokens.

All methods except `OutputQueues.deliver` must be called on the event loop's thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..api.errors import EngineStoppedError, MeshserveError
from ..api.request import FinishReason, Output
from ..scheduler.limits import SchedulerLimits

DEFAULT_MAX_UNDELIVERED_TOKENS = 4096  # per request; divided among its samples
_MIN_SAMPLE_TOKENS = 256
_PROMPT_POSITIONS_PER_TOKEN = 8  # a prompt has thousands of log-probabilities, so they count less
_MAX_JOINED_TOKENS = 512  # in several outputs; a single output may have more


class RequestIdInUseError(MeshserveError):
    """The request_id belongs to a request that has not ended yet."""


class SlowReaderError(MeshserveError):
    """The caller has more unread tokens than the server keeps."""


class OutputQueue:
    """Holds the outputs of one request until its handler takes them. Created by `OutputQueues.open`."""

    def __init__(self, request_id: str, num_samples: int = 1, max_sample_tokens: int = DEFAULT_MAX_UNDELIVERED_TOKENS):
        self.request_id = request_id
        self.num_undelivered_tokens = [0] * num_samples  # by sample
        self.max_sample_tokens = max_sample_tokens
        self.num_samples = num_samples
        self.num_open_samples = num_samples  # the engine has not delivered their last output
        self.is_abandoned = False  # the handler is gone
        self._outputs: dict[int, list[Output]] = {}  # by sample, in the order in which they will be taken
        self._error: MeshserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None  # may be blocked in a write

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def has_ended(self) -> bool:
        return self.num_open_samples == 0

    def put(self, output: Output) -> None:
        """Adds an output. Ignored after a failure."""
        if output.finish_reason is not None:
            self.num_open_samples -= 1
        if self._error is None and not self.is_abandoned:
            self._outputs.setdefault(output.index, []).append(output)
            self.num_undelivered_tokens[output.index] += _num_tokens(output)
            self._wake()

    def fail(self, error: MeshserveError, *, keeps_outputs: bool = False) -> bool:
        """Makes `take` raise `error`, at once or after the outputs that are queued.

        Returns False, without effect, if the request has already ended or failed.
        """
        if self.has_ended or self._error is not None:
            return False
        self._error = error
        if not keeps_outputs:
            self._outputs.clear()
        self._wake()
        if self._writer is not None:
            self._writer.cancel()
        return True

    async def take(self) -> Output:
        """Returns the queued outputs of one sample as one output, waiting for the first. Only one task may wait.

        Raises:
          MeshserveError: The error passed to `fail`.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        index = next(iter(self._outputs))
        gathered = self._outputs.pop(index)
        num_outputs = num_tokens = 0
        while num_outputs < len(gathered) and num_tokens < _MAX_JOINED_TOKENS:
            num_tokens += _num_tokens(gathered[num_outputs])
            num_outputs += 1
        outputs = gathered[:num_outputs]
        if num_outputs < len(gathered):
            self._outputs[index] = gathered[num_outputs:]  # last, so that every sample has its turn
        self.num_undelivered_tokens[index] -= num_tokens
        return outputs[0] if len(outputs) == 1 else join(outputs)

    async def handing_over(self, write: Awaitable[None]) -> None:
        """Awaits a write to the caller. It may block while the caller does not read, but `fail` ends it.

        Raises:
          MeshserveError: The error passed to `fail`.
        """
        self._writer = asyncio.current_task()
        assert self._writer is not None
        try:
            await write
        except asyncio.CancelledError:
            if self._error is None:
                raise
            self._writer.uncancel()
            raise self._error from None
        finally:
            self._writer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _num_tokens(output: Output) -> int:
    """Returns the number of tokens that an output adds to the limit for slow readers."""
    return len(output.token_ids) + len(output.prompt_logprobs) // _PROMPT_POSITIONS_PER_TOKEN


def max_dispatch_tokens(limits: SchedulerLimits) -> int:
    """Returns how many tokens one dispatch can bring for a sample, as `_num_tokens` counts them."""
    num_tokens = max(limits.max_decode_steps, 1 + limits.draft_tokens)
    return num_tokens + limits.max_step_tokens // _PROMPT_POSITIONS_PER_TOKEN


def join(outputs: Sequence[Output]) -> Output:
    """Joins consecutive outputs of one sample into one."""
    last = outputs[-1]
    return Output(
        request_id=last.request_id,
        index=last.index,
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        message=last.message,
        num_prompt_tokens=last.num_prompt_tokens,
        num_output_tokens=last.num_output_tokens,
        num_cached_tokens=last.num_cached_tokens,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        prompt_logprobs=tuple(logprob for output in outputs for logprob in output.prompt_logprobs),
    )


class OutputQueues:
    """The output queues of all open requests.

    A request id stays in use until the engine has delivered its last output, even if the handler is gone. Otherwise
    that output could reach a later request with the same id.
    """

    def __init__(self, *, max_undelivered_tokens: int = DEFAULT_MAX_UNDELIVERED_TOKENS, max_dispatch_tokens: int = 1):
        """Sets the bounds of a request's undelivered tokens, and of the tokens that a dispatch brings for a sample."""
        self._max_undelivered_tokens = max_undelivered_tokens
        self.max_dispatch_tokens = max_dispatch_tokens  # set again once the server's limits are known
        self._by_request: dict[str, OutputQueue] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancel: Callable[[str, FinishReason], None] | None = None

    @property
    def num_open(self) -> int:
        """Number of requests whose callers still expect output, which failed ones do not. Any thread may read it."""
        return sum(not (queue.is_abandoned or queue.has_failed) for queue in list(self._by_request.values()))

    @property
    def open_ids(self) -> list[str]:
        """The requests of which callers still expect output."""
        return [request_id for request_id in list(self._by_request) if self.is_open(request_id)]

    def is_open(self, request_id: str) -> bool:
        """Returns whether a caller still expects output of this request."""
        queue = self._by_request.get(request_id)
        return queue is not None and not (queue.is_abandoned or queue.has_failed or queue.has_ended)

    def bind(self, cancel: Callable[[str, FinishReason], None]) -> None:
        """Sets the event loop and the engine's `cancel`. Must be called once, before the first `open`."""
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Queues all outputs of a step. May be called from any thread. Outputs of unknown requests are dropped."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._distribute, tuple(outputs))
        except RuntimeError:
            if not self._loop.is_closed():  # a closed loop means that the server has stopped
                raise

    def open(self, request_id: str, num_samples: int = 1) -> OutputQueue:
        """Creates the queue of a new request. End it with `close`, or with `discard` if submitting the request fails.

        Raises:
          RequestIdInUseError: The id belongs to an open request.
        """
        if request_id in self._by_request:
            raise RequestIdInUseError(
                f"request_id {request_id!r} belongs to a request that has not ended; ids must be unique among the open "
                "requests. Choose another, or omit request_id and the server generates one."
            )
        most = self._max_sample_tokens(num_samples)
        queue = self._by_request[request_id] = OutputQueue(request_id, num_samples, most)
        return queue

    def discard(self, queue: OutputQueue) -> None:
        """Removes the queue of a request that was not submitted."""
        del self._by_request[queue.request_id]

    def close(self, queue: OutputQueue, reason: FinishReason) -> None:
        """Ends the queue when its handler returns. A request that has not ended is cancelled with `reason`."""
        queue.is_abandoned = True
        if queue.has_ended:
            del self._by_request[queue.request_id]
        else:
            self._cancel_request(queue, reason)

    def fail_all(self, error: EngineStoppedError) -> None:
        """Fails every request that has not ended with `error`, after what has been generated for it."""
        for queue in self._by_request.values():
            queue.fail(error, keeps_outputs=True)

    def _distribute(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            queue = self._by_request.get(output.request_id)
            if queue is None:
                continue
            queue.put(output)
            if queue.has_ended:
                if queue.is_abandoned:
                    del self._by_request[output.request_id]
            elif queue.num_undelivered_tokens[output.index] > queue.max_sample_tokens:
                self._give_up(queue, output.index)

    def _max_sample_tokens(self, num_samples: int) -> int:
        """Returns the number of undelivered tokens that each sample of a request may have.

        It is never less than two dispatches, so that a reader that takes each dispatch before the next one keeps up.
        """
        total = self._max_undelivered_tokens
        return max(total // num_samples, min(total, _MIN_SAMPLE_TOKENS), 2 * self.max_dispatch_tokens)

    def _give_up(self, queue: OutputQueue, index: int) -> None:
        """Fails a request at once, because its handler may be blocked in a write until the caller reads again."""
        error = SlowReaderError(
            f"{queue.num_undelivered_tokens[index]} tokens are unread; this server keeps at most "
            f"{queue.max_sample_tokens} per sample of this request. Read the stream as it arrives."
        )
        if queue.fail(error):
            self._cancel_request(queue, FinishReason.CANCELLED)

    def _cancel_request(self, queue: OutputQueue, reason: FinishReason) -> None:
        assert self._cancel is not None, "call bind before open"
        self._cancel(queue.request_id, reason)
