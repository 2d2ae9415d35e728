"""Step 4 of 10: who computes what in the next step. In: queues, pages, limits. Out: StepPlan.

Pure decision: no jax, no clock, no I/O; the same calls give the same plans. The engine plans one step ahead:

    plan k+1  (step k still runs)  ->  dispatch k+1  ->  collect the tokens of step k  ->  account(k)

so a plan counts the tokens in flight (`Request.num_pending_tokens`) without knowing their ids. Pages and rows that a
request loses are handed on at once, although a step in flight may still write to them: the device runs steps in order,
so the new owner's writes come later.

One order rules everything, that of arrival. Running requests are always older than waiting ones: admission takes the
front of the queue, and the request preempted is the newest that runs, which goes back to the front. Hence
  * the oldest request never gives way, and its need was checked against the whole cache: every plan makes progress;
  * only the newest running request can be in the middle of its prefill, so decodes are always served first.
"""

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from .errors import InvalidRequestError, QueueFullError
from .pages import PageAllocator
from .request import FinishReason, Request

RETRY_SECONDS = 1.0  # the hint to refused callers: without a clock the scheduler cannot know how fast the queue drains


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What a step and the queue may hold."""

    page_size: int  # tokens a page
    max_running: int  # requests that hold a row
    max_step_tokens: int  # decodes and prefill chunks of one step together; at least max_running
    max_waiting: int  # requests in the queue; more are refused
    max_context: int  # tokens of prompt and output of one request


class Chunk(NamedTuple):
    """Positions start..start+num_tokens-1 of a request, computed by one step. (A tuple: half a dataclass's cost.)"""

    request: Request
    start: int
    num_tokens: int
    is_sampling: bool  # the chunk ends with the request's last token, so the step samples the next one


@dataclass(frozen=True)
class StepPlan:
    """One step's work. Read `pages` and `row` of its requests before the scheduler's next call: it may change them."""

    chunks: tuple[Chunk, ...]  # those of one token first, then longer ones; in either part oldest request first
    preempted: tuple[Request, ...]  # lost their pages and row for older ones in this plan, newest first

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Progress(NamedTuple):
    """What a step brought for one request. The request is finished if its `finish_reason` says so."""

    request: Request
    token_id: int | None  # None: the step sampled an end token, which is not part of the output


@dataclass
class _Draft:
    """A plan in the making."""

    num_tokens_left: int
    decodes: list[Chunk] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Decides; owns the scheduling fields of every Request from `add` until its last step in flight is accounted.

    `num_preemptions` and `num_wasted_tokens` count since the start: a wasted token was sampled for a request that had
    ended by the time the host saw it.
    """

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator, eos_token_ids: frozenset[int]):
        assert min(limits.page_size, limits.max_waiting) >= 1 and limits.max_context >= 2, limits
        assert limits.max_step_tokens >= limits.max_running >= 1, limits  # or decodes would wait for each other
        self.limits = limits
        self.num_preemptions = 0
        self.num_wasted_tokens = 0
        self._pages = pages
        self._eos_token_ids = eos_token_ids
        # All three in order of arrival; ordered maps, because a request may leave from anywhere.
        self._requests: dict[str, Request] = {}
        self._running: dict[Request, None] = {}
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._max_total_tokens: dict[Request, int] = {}  # prompt and longest output, of unfinished requests
        self._free_rows = list(range(limits.max_running))  # a heap
        self.requests: Mapping[str, Request] = MappingProxyType(self._requests)  # the unfinished ones, by request_id

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue. Preempted ones count, so this may exceed max_waiting by up to max_running."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished. Steps of finished requests may still be in flight."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Puts a new request at the end of the queue.

        Raises:
          InvalidRequestError: it could never run under these limits, or its id is in use.
          QueueFullError: max_waiting requests wait already.
        """
        assert not (request.num_computed_tokens or request.output_token_ids or request.is_finished), request.request_id
        max_total_tokens = self._check_size(request)
        if request.request_id in self._requests:
            message = f"{request.request_id!r} is still being served. Use another, or wait until it has ended."
            raise InvalidRequestError("request_id", message)
        num_waiting, max_waiting = len(self._waiting), self.limits.max_waiting
        if num_waiting >= max_waiting:
            message = f"{num_waiting} requests wait; this server queues {max_waiting} (max_waiting). Retry later."
            raise QueueFullError(message, RETRY_SECONDS)
        self._requests[request.request_id] = request
        self._max_total_tokens[request] = max_total_tokens
        self._waiting[request] = None

    def _check_size(self, request: Request) -> int:
        """The most tokens, prompt and output together, it may come to have; raises if context or cache is too small."""
        max_context, page_size = self.limits.max_context, self.limits.page_size
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "has no tokens; at least 1 is needed. Send a text that is not empty.")
        if num_prompt_tokens >= max_context:
            raise InvalidRequestError(
                "prompt",
                f"has {num_prompt_tokens} tokens; this server accepts {max_context - 1} (max_context less one token of "
                "output). Shorten it or restart with a larger --max-context.",
            )
        max_total_tokens = min(num_prompt_tokens + request.params.max_tokens, max_context)
        num_pages = self._num_pages_for(max_total_tokens - 1)  # keys and values of the last token are never needed
        if num_pages > self._pages.num_pages:
            num_spare_tokens = self._pages.num_pages * page_size + 1 - num_prompt_tokens
            fits = num_spare_tokens > 0
            remedy = f"Ask for {num_spare_tokens} or fewer" if fits else "Shorten the prompt"
            raise InvalidRequestError(
                "sampling.max_tokens" if fits else "prompt",
                f"{num_prompt_tokens} prompt tokens and up to {max_total_tokens - num_prompt_tokens} of output need "
                f"{num_pages} pages of {page_size} tokens; the whole cache has {self._pages.num_pages}. {remedy}, or "
                "restart with a larger cache (--num-pages, --memory-fraction).",
            )
        return max_total_tokens

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    def plan(self) -> StepPlan | None:
        """Decides the next step and books it: tokens count as computed, pages and rows are assigned.

        Returns None when nothing can run: no request, or all wait for tokens in flight to be accounted. (A request
        preempted on the way to None is counted in `num_preemptions` only.) Costs O(running), whatever the queue holds.
        """
        draft = _Draft(self.limits.max_step_tokens)
        self._schedule_running(draft)
        if not draft.preempted:  # pages taken from a request must not go to a newer one, nor straight back to it
            self._admit(draft)
        chunks = (*draft.decodes, *draft.prefills)
        return StepPlan(chunks, tuple(draft.preempted)) if chunks else None

    def _schedule_running(self, draft: _Draft) -> None:
        """All decodes and, last, the prefill that an earlier step left unfinished."""
        for request in tuple(self._running):
            if request.row is None:
                break  # preempted for an older one, and with it all that follow
            num_tokens = request.num_tokens
            if num_tokens < self._max_total_tokens[request]:  # else its whole output is known or in flight
                self._schedule(request, num_tokens, draft)

    def _admit(self, draft: _Draft) -> None:
        """Starts waiting requests, first come first served, while budget, rows and pages suffice."""
        while self._waiting and self._free_rows and draft.num_tokens_left:
            request = next(iter(self._waiting))
            if request.num_pending_tokens:
                return  # preempted with a step in flight: what it must recompute is not known yet
            # One page to spare for every running request, or its next tokens would soon preempt the newcomer. With none
            # running all pages are free, and those suffice.
            num_tokens = request.num_known_tokens
            if self._num_pages_for(num_tokens) + len(self._running) > self._pages.num_free_pages:
                return
            del self._waiting[request]
            self._running[request] = None
            request.row = heapq.heappop(self._free_rows)
            self._schedule(request, num_tokens, draft)

    def _schedule(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        """Adds what a running request of `num_tokens` lacks, within the budget. If pages are short the newest running
        request is preempted, possibly this one."""
        start = request.num_computed_tokens
        end = min(num_tokens, start + draft.num_tokens_left)
        num_new_pages = -(-end // self.limits.page_size) - len(request.pages)
        if num_new_pages > 0:
            while num_new_pages > self._pages.num_free_pages:
                victim = self._preempt_newest()
                draft.preempted.append(victim)
                if victim is request:
                    return
            request.pages += self._pages.allocate(num_new_pages)
        is_sampling = end == num_tokens
        request.num_computed_tokens = end
        request.num_pending_tokens += is_sampling
        draft.num_tokens_left -= end - start
        chunks = draft.decodes if end - start == 1 else draft.prefills
        chunks.append(Chunk(request, start, end - start, is_sampling))

    def _preempt_newest(self) -> Request:
        """Takes pages and row from the newest running request; it will compute its known tokens anew."""
        request, _ = self._running.popitem()
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)  # older than all that wait
        return request

    def preempt_all(self) -> None:
        """Takes pages and rows from all running requests. Call it when no step is in flight."""
        while self._running:
            self._preempt_newest()

    def _release(self, request: Request) -> None:
        self._pages.free(request.pages)
        request.pages = []
        assert request.row is not None, request.request_id
        heapq.heappush(self._free_rows, request.row)
        request.row = None

    def account(self, plan: StepPlan, sampled: Sequence[int | None]) -> list[Progress]:
        """Books the tokens of a finished step. Call it once for every plan, in the order of the plans.

        Args:
          sampled: one entry a chunk, in the order of `plan.chunks`; those of chunks that do not sample are ignored.
        Returns: one entry for each request that is still wanted and got a token or its end, in chunk order. Requests
          that ended in the meantime are left out; their tokens are wasted.
        """
        assert len(sampled) == len(plan.chunks), f"{len(sampled)} tokens for {len(plan.chunks)} chunks"
        progress = []
        for (request, _, _, is_sampling), token_id in zip(plan.chunks, sampled, strict=True):
            if not is_sampling:
                continue
            assert token_id is not None, f"request {request.request_id}: its chunk samples, but no token came"
            request.num_pending_tokens -= 1
            if request.finish_reason is not None:
                self.num_wasted_tokens += 1
            elif token_id in self._eos_token_ids and not request.params.ignore_eos:
                self.finish(request, FinishReason.STOP)
                progress.append(Progress(request, None))
            else:
                request.output_token_ids.append(token_id)
                if request.num_known_tokens >= self._max_total_tokens[request]:
                    self.finish(request, FinishReason.LENGTH)
                progress.append(Progress(request, token_id))
        return progress

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """Ends a request wherever it stands; pages and row are free at once. Returns False if it had ended before."""
        if request.finish_reason is not None:
            return False
        if request.row is None:
            del self._waiting[request]
        else:
            del self._running[request]
            self._release(request)
        del self._requests[request.request_id]
        del self._max_total_tokens[request]
        request.finish_reason = reason
        return True

    def audit(self) -> None:
        """Proves the invariants of queues, rows and pages; AssertionError names the fault. O(requests + pages)."""
        in_order = [*self._running, *self._waiting]
        assert in_order == list(self._requests.values()), "running, then waiting, is not everyone in order of arrival"
        assert set(in_order) == self._max_total_tokens.keys(), "lengths are kept of others than the unfinished requests"
        for request in in_order:
            name = f"request {request.request_id}"
            assert not request.is_finished, f"{name} is finished but still held"
            num_known, num_tokens, limit = request.num_known_tokens, request.num_tokens, self._max_total_tokens[request]
            assert num_known <= num_tokens <= limit, f"{name} has {num_known}, {num_tokens} tokens of at most {limit}"
            num_pages = self._num_pages_for(request.num_computed_tokens)
            assert len(request.pages) == num_pages, f"{name} owns {len(request.pages)} pages, needs {num_pages}"
            is_placed = request.row is not None and request.num_computed_tokens > 0
            is_bare = request.row is None and request.num_computed_tokens == 0
            assert is_placed if request in self._running else is_bare, f"{name} stands in the wrong queue"
        for index, request in enumerate(self._running, start=1):
            num_left = request.num_tokens - request.num_computed_tokens
            is_prefill_last = num_left == 1 or (num_left > 1 and index == len(self._running))
            assert is_prefill_last, f"request {request.request_id} lacks {num_left} tokens, yet newer requests run"
        rows = sorted([request.row for request in self._running if request.row is not None] + self._free_rows)
        assert rows == list(range(self.limits.max_running)), f"rows in use and free together are {rows}"
        self._pages.audit(request.pages for request in self._running)
