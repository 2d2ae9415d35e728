"""Step 9 of 10: from the engine's thread to the streams. In: the outputs of a step. Out: one output for each wake-up.

The engine delivers once a step; that costs one wake-up of the event loop, not one for each token. Each open request has
an `OutputQueue`. Its handler takes whatever has gathered there as one output, so a busy loop sends fewer, larger
messages.

gRPC's flow control pushes back only after megabytes of unread tokens, so the queue is the bound on a slow reader.

Everything but `OutputQueues.deliver` belongs to the event loop's thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..api.errors import EngineStoppedError, MeshserveError
from ..api.request import FinishReason, Output

DEFAULT_MAX_UNDELIVERED_TOKENS = 4096
_PROMPT_POSITIONS_PER_TOKEN = 8  # log-probabilities of a prompt come by the thousand, and count less
_MAX_JOINED_TOKENS = 512  # and no fewer than one output has: clients take messages of some MB


class RequestIdInUseError(MeshserveError):
    """The caller's request_id names a request that has not ended yet."""


class SlowReaderError(MeshserveError):
    """More tokens wait for the caller than the server keeps."""


class OutputQueue:
    """Outputs of one request that its handler has not taken yet. Made by `OutputQueues.open`."""

    def __init__(self, request_id: str, num_samples: int = 1):
        self.request_id = request_id
        self.num_undelivered_tokens = 0
        self.num_samples = num_samples
        self.num_open_samples = num_samples  # whose last output the engine has not delivered
        self.is_abandoned = False  # no handler will take anything any more
        self._outputs: list[Output] = []
        self._error: MeshserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None  # hangs in a write, as far as is known here

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
            self._outputs.append(output)
            self.num_undelivered_tokens += _num_tokens(output)
            self._wake()

    def fail(self, error: MeshserveError) -> bool:
        """Makes `take` raise, unless the request has ended or failed already. Returns whether it does."""
        if self.has_ended or self._error is not None:
            return False
        self._error = error
        self._outputs.clear()
        self._wake()
        if self._writer is not None:
            self._writer.cancel()
        return True

    async def take(self) -> Output:
        """What has gathered of one sample, as one output; waits for something to gather. At most one task may wait.

        Raises:
          MeshserveError: the one that `fail` was given.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        index, num_tokens = self._outputs[0].index, 0
        outputs: list[Output] = []
        others: list[Output] = []
        for output in self._outputs:
            is_taken = output.index == index and num_tokens < _MAX_JOINED_TOKENS
            (outputs if is_taken else others).append(output)
            num_tokens += _num_tokens(output) if is_taken else 0
        self._outputs = others
        self.num_undelivered_tokens -= num_tokens
        return outputs[0] if len(outputs) == 1 else join(outputs)

    async def handing_over(self, write: Awaitable[None]) -> None:
        """Awaits a write of what was taken. It may hang for as long as the caller does not read, but not after `fail`.

        Raises:
          MeshserveError: the one that `fail` was given.
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
    """Returns how many tokens an output counts for against the bound on what a reader has not read."""
    return len(output.token_ids) + len(output.prompt_logprobs) // _PROMPT_POSITIONS_PER_TOKEN


def join(outputs: Sequence[Output]) -> Output:
    """Outputs of one sample, in order, as one."""
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
    """The mailboxes of all open requests.

    A request id is taken until the engine has delivered its last output, even when the handler left long before:
    otherwise that output would reach a later request of the same id.
    """

    def __init__(self, *, max_undelivered_tokens: int = DEFAULT_MAX_UNDELIVERED_TOKENS):
        self._max_undelivered_tokens = max_undelivered_tokens
        self._by_request: dict[str, OutputQueue] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancel: Callable[[str, FinishReason], None] | None = None

    @property
    def num_open(self) -> int:
        """Requests whose callers have more to come. A failed one is not: its handler may hang for as long as the caller
        does not read."""
        return sum(not (queue.is_abandoned or queue.has_failed) for queue in list(self._by_request.values()))

    def is_open(self, request_id: str) -> bool:
        """Whether a caller has more to come of this request."""
        queue = self._by_request.get(request_id)
        return queue is not None and not (queue.is_abandoned or queue.has_failed or queue.has_ended)

    def bind(self, cancel: Callable[[str, FinishReason], None]) -> None:
        """Ties the room to the running loop, and to the engine's `cancel`. Once, before the first `open`."""
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Takes all outputs of a step, from any thread. Those nobody waits for are dropped."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._distribute, tuple(outputs))
        except RuntimeError:
            if not self._loop.is_closed():  # closed: the server is gone, and with it everybody who waited
                raise

    def open(self, request_id: str, num_samples: int = 1) -> OutputQueue:
        """A mailbox for a request about to be submitted. End it with `close`, or `discard` if submitting fails.

        Raises:
          RequestIdInUseError: the id is taken.
        """
        if request_id in self._by_request:
            raise RequestIdInUseError(
                f"request_id {request_id!r} names a request that has not ended; allowed is an id that is unique among "
                "the open requests. Leave request_id out and the server draws one."
            )
        queue = self._by_request[request_id] = OutputQueue(request_id, num_samples)
        return queue

    def discard(self, queue: OutputQueue) -> None:
        """Forgets a mailbox whose request the engine does not know."""
        del self._by_request[queue.request_id]

    def close(self, queue: OutputQueue, reason: FinishReason) -> None:
        """The handler leaves. A request that has not ended is cancelled for `reason`."""
        queue.is_abandoned = True
        if queue.has_ended:
            del self._by_request[queue.request_id]
        else:
            self._cancel_request(queue, reason)

    def fail_all(self, error: EngineStoppedError) -> None:
        """Every open request that has not ended fails with `error`."""
        for queue in self._by_request.values():
            queue.fail(error)

    def _distribute(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            queue = self._by_request.get(output.request_id)
            if queue is None:
                continue
            queue.put(output)
            if queue.has_ended:
                if queue.is_abandoned:
                    del self._by_request[output.request_id]
            elif queue.num_undelivered_tokens > self._max_undelivered_tokens:
                self._give_up(queue)

    def _give_up(self, queue: OutputQueue) -> None:
        """At once and not when the handler notices: it may hang in a write until the caller reads again."""
        error = SlowReaderError(
            f"{queue.num_undelivered_tokens} tokens wait to be read; this server keeps "
            f"{self._max_undelivered_tokens} for a request. Read the stream as it comes."
        )
        if queue.fail(error):
            self._cancel_request(queue, FinishReason.CANCELLED)

    def _cancel_request(self, queue: OutputQueue, reason: FinishReason) -> None:
        assert self._cancel is not None, "bind comes before open"
        self._cancel(queue.request_id, reason)
