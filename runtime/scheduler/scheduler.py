"""Step 4 of 10: decides what the next step computes for which requests. In: queues, pages, limits. Out: StepPlan.

The scheduler is deterministic: it uses no jax, no clock and no I/O, and the same calls give the same plans. The engine
plans one step ahead:

    plan k+1  (step k still runs)  ->  dispatch k+1  ->  collect the tokens of step k  ->  account(k)

so a plan counts the tokens in flight (`Request.num_pending_tokens`) without knowing their ids. The device runs steps in
order, so freed pages and slots are reused immediately, and a full page is shared as soon as its tokens are known.

The requests of a tenant follow one order, the rank: the arrival time minus `priority_seconds` per level of priority.
The rank of a request never changes. Admission takes the request with the lowest rank. A request that lacks pages or a
slot preempts the running request with the highest rank, provided that rank is higher than its own. So the first request
in rank is never preempted, and since its needs were checked against the whole cache, every plan makes progress. Between
tenants `fair_shares.py` decides: each keeps its share of slots and pages, and requests beyond a share are preempted
first. docs/scheduling.md has the proofs and explains the options.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from ..api.errors import InvalidRequestError, QueueFullError
from ..api.request import NO_TOKEN, FinishReason, Request
from .adapter_slots import Adapters
from .drafts.speculation import Speculation
from .fair_shares import FairShares
from .limits import SchedulerLimits
from .pace import Pace
from .page_allocator import PageAllocator
from .page_keys import begin_page_keys, extend_page_keys
from .ranked_queue import RankedQueue
from .request_audit import audit_request
from .running import NEVER, Running, book_prompt_logprobs
from .step_plan import Draft, Progress, ScheduledChunk, StepPlan


class Scheduler:
    """Plans steps and tracks the requests.

    Owns the scheduling fields of every Request from `add` until its last step in flight is accounted for. The public
    counters count from the start. A wasted token is one sampled for a request that had ended when the host received it.
    """

    def __init__(
        self, limits: SchedulerLimits, pages: PageAllocator, eos_token_ids: frozenset[int], adapters: Adapters = None
    ):
        self.limits, self.adapters = limits, adapters
        self.num_preemptions = self.num_wasted_tokens = 0
        self.num_refused = 0  # samples refused because the queue was full
        self.num_expired = 0  # requests whose deadline passed or could no longer be met
        self.num_not_finite = 0  # requests that ended with NO_TOKEN
        self._pages = pages
        self._eos_token_ids = eos_token_ids
        self._requests: dict[Request, None] = {}  # unfinished requests, in order of arrival
        self._shares = FairShares(limits, pages, adapters)
        self._running = Running(limits, pages, self._shares)
        self.speculation = Speculation(limits, pages, self._running)
        self._leaving: set[Request] = set()  # whole output in flight; pages and slot already freed
        self._about_to_leave: list[Request] = []
        self._deadlines: RankedQueue[float] = RankedQueue()
        self._expired: list[Request] = []
        self._arrivals = itertools.count()
        self._pace = Pace()
        self._weights_key = b""  # of the weights that compute the pages
        self._is_holding = False  # see `hold_new`

    @property
    def requests(self) -> Collection[Request]:
        """The unfinished requests, in order of arrival."""
        return self._requests.keys()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The length of the queue. Includes preempted requests, so it may exceed max_waiting by up to max_running."""
        return self._shares.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished and not held. Steps of finished requests may still be in flight."""
        return len(self._requests) > self._shares.num_held

    def add(self, *requests: Request) -> None:
        """Adds new requests to the queue, all or none. The samples of one prompt are passed in one call.

        Raises:
          InvalidRequestError: A request can never run under these limits, or there are more than the queue can hold.
          QueueFullError: The queue has no room for them now.
        """
        for request in requests:
            assert not (request.num_computed_tokens or request.output_token_ids or request.is_finished), request
            request.max_total_tokens = self.limits.max_total_tokens(request, self._pages.num_pages)
        max_waiting = self.limits.max_waiting
        if len(requests) > max_waiting:
            raise InvalidRequestError("n", f"is {len(requests)}; this server queues {max_waiting} (max_waiting).")
        self.check_room(requests[0].arrival_seconds, len(requests), requests[0].tenant, requests[0].weight)
        if not self._requests:
            self._rest()
        if not self.num_waiting:
            self._pace.queue_began(requests[0].arrival_seconds)
        for request in requests:
            head_start = request.priority * self.limits.priority_seconds
            request.rank = (request.arrival_seconds - head_start, next(self._arrivals))
            self._requests[request] = None
            if request.weights_key != self._weights_key:  # the weights have changed since `prepare`
                begin_page_keys(request, self._weights_key)
            request.is_held = self._is_holding
            self._shares.open(request)
            if request.deadline_seconds < math.inf:
                self._deadlines.push(request.deadline_seconds, request)

    def prepare(self, requests: Sequence[Request]) -> None:
        """Sets what takes time to compute for the new samples of one prompt. Call before `add`; needs no lock."""
        first, page_size = requests[0], self.limits.page_size
        first.weights_key = self._weights_key
        if self.limits.has_prefix_cache:
            extend_page_keys(first, page_size, (len(first.prompt_token_ids) - 1) // page_size)
        first.drafter = self.speculation.drafter(first)
        for request in requests[1:]:
            request.page_keys, request.weights_key = list(first.page_keys), first.weights_key
            request.drafter = first.drafter.fork() if first.drafter is not None else None

    def check_room(self, now: float, num_requests: int = 1, tenant: str = "", weight: float = 1.0) -> None:
        """Checks that the queue has room for more requests of a tenant, and counts them as refused if not.

        Raises:
          QueueFullError: The queue has no room for them.
        """
        if not self._shares.may_queue(tenant, weight, num_requests):
            self.num_refused += num_requests
            max_waiting, num_waiting = self.limits.max_waiting, self.num_waiting
            message = f"{num_waiting} requests wait; this server queues {max_waiting} (max_waiting). Retry later."
            raise QueueFullError(message, self._pace.retry_seconds(now, num_waiting, self._shares.mean_prompt_tokens()))

    def plan(self, now: float) -> StepPlan | None:
        """Plans the next step and books it: its tokens count as computed, and pages and slots are assigned.

        Returns None if nothing can run: there is no request, or all wait for tokens in flight. Takes O(running) time,
        independent of the queue's length. Requests ended because of their deadline are left for `take_expired`.
        """
        self._let_leave()
        self._shares.end_awaiting()
        while (late := self._deadlines.first) is not None and late.deadline_seconds <= now:
            self._expire(late, now)
        self.speculation.begin_plan()
        if self.limits.draft_tokens and self.speculation.keeps_step(self.num_waiting):
            return None
        draft = Draft(now=now, num_tokens_left=self.limits.max_step_tokens)
        prefilling = self._plan_decodes(draft)
        draft.num_tokens_left -= len(draft.decodes)
        if draft.decodes and self.limits.max_prefill_tokens:
            is_load_low = self._running.is_load_low(prefilling, len(draft.decodes))
            num_beside = self.limits.num_beside(len(draft.decodes), is_load_low)
            draft.num_tokens_left = min(draft.num_tokens_left, num_beside)
        for request in prefilling:
            self._admit(draft, ahead_of=request)
            if request.slot is not None:
                self._plan_prefill(request, draft)
        self._admit(draft, ahead_of=None)
        draft.fit(self.limits)
        prefills = draft.single_prefills + draft.long_prefills
        if not prefills and not draft.decodes:
            return None
        logprob_starts = {}
        for chunk in prefills:
            self._running.publish(chunk.request)
            if chunk.request.num_prompt_logprobs_left:
                logprob_starts[chunk.request] = book_prompt_logprobs(chunk)
        drafts = self.speculation.extend(draft) if self.limits.draft_tokens else []
        if drafts:
            num_steps, lengths = 1, [1 + len(tokens) for tokens in drafts]
        else:
            num_steps, lengths = (1, []) if prefills else self._widen(draft)
        return StepPlan(
            decodes=draft.decodes,
            starts=draft.starts,
            prefills=prefills,
            num_steps=num_steps,
            drafts=drafts,
            decode_lengths=lengths,
            prompt_logprob_starts=logprob_starts,
            num_sitting_out=draft.num_sitting_out,
            planned_seconds=now,
            admitted=draft.admitted,
            preempted=draft.preempted,
        )

    def take_expired(self) -> list[Request]:
        """Returns the requests that `plan` has ended because of their deadline since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def _plan_decodes(self, draft: Draft) -> list[Request]:
        """Plans one token for each request that can decode. Returns the requests still in prefill, in their order.

        If a request lacks a page and nothing may be preempted for it, it keeps its pages and sits out this step.
        """
        decodes, starts, about_to_leave = draft.decodes, draft.starts, self._about_to_leave
        has_drafts = self.limits.draft_tokens > 0
        prefilling = []
        for request in self._running:
            if request.slot is None:
                continue  # preempted for another one
            start = request.num_computed_tokens
            if start < request.num_prefill_tokens and not (request.is_blocked or request.is_fetching):
                prefilling.append(request)
                continue
            is_parked = request.is_blocked or request.is_fetching
            if request.num_drafts or is_parked or (has_drafts and self.speculation.awaits(request)):
                draft.num_sitting_out += 1
                continue
            if start == request.num_page_positions and not self._grow(request, draft):
                continue
            request.num_computed_tokens = end = start + 1
            request.num_pending_tokens += 1
            decodes.append(request)
            starts.append(start)
            if end + 1 == request.max_total_tokens:
                about_to_leave.append(request)
        return sorted([request for request in prefilling if request.slot is not None], key=self._shares.turn)

    def _grow(self, request: Request, draft: Draft) -> bool:
        """Assigns one more page to a running request, preempting others if needed. False if it must wait."""
        while not self._pages.num_free_pages:
            victim = self._shares.victim_of_growth(request)
            if victim is None and request is self._running.first is not self._running.last:
                victim = self._running.last  # the first of all never waits, so that every plan makes progress
            if victim is None:
                return False
            self._preempt_for(victim, draft)
        self._running.assign(request, self._pages.allocate(1))
        return True

    def _widen(self, draft: Draft) -> tuple[int, list[int]]:
        """Plans several decode steps in this dispatch if no request waits and enough pages are free.

        Returns the number of steps, and that of each decode; (1, []) for an ordinary step.
        """
        num_steps, num_decodes = self.limits.max_decode_steps, len(draft.decodes)
        is_alone = not self.num_waiting and num_decodes == len(self._running)
        is_alone &= num_decodes <= (self.limits.multi_step_requests or num_decodes)
        if num_steps == 1 or not is_alone or any(request.needs_processors for request in draft.decodes):
            return 1, []
        lengths = [
            min(num_steps, request.max_total_tokens - 1 - start)
            for request, start in zip(draft.decodes, draft.starts, strict=True)
        ]
        num_steps = max(lengths)
        short = [
            request
            for request, start, length in zip(draft.decodes, draft.starts, lengths, strict=True)
            if start + length > request.num_page_positions
        ]
        if num_steps == 1 or len(short) > self._pages.num_free_pages:
            return 1, []
        for request, page in zip(short, self._pages.allocate(len(short)), strict=True):
            self._running.assign(request, [page])
        for request, length in zip(draft.decodes, lengths, strict=True):
            request.num_computed_tokens += length - 1
            request.num_pending_tokens += length - 1
            if length > 1 and request.num_computed_tokens + 1 == request.max_total_tokens:
                self._about_to_leave.append(request)
        return self.limits.max_decode_steps, lengths

    def _plan_prefill(self, request: Request, draft: Draft) -> None:
        """Plans as many known tokens of a request as the token budget allows. Its pages were assigned on admission."""
        if not draft.num_tokens_left or request.is_fetching:
            return
        start = request.num_computed_tokens
        if not request.is_admitted:
            draft.begin(request, self.limits.page_size)
        end = min(request.num_prefill_tokens, start + draft.num_tokens_left)
        is_sampling = end == request.num_prefill_tokens
        request.num_computed_tokens = end
        request.num_pending_tokens += is_sampling
        self._shares.prefilled(request, end - start)
        draft.add_prefill(ScheduledChunk(request, start, end - start, is_sampling))
        page_size = self.limits.page_size
        draft.page_keys.update(request.page_keys[start // page_size : self.limits.num_pages_for(end)])
        if is_sampling and end + 1 == request.max_total_tokens:
            self._about_to_leave.append(request)

    def _admit(self, draft: Draft, ahead_of: Request | None) -> None:
        """Admits waiting requests while the token budget lasts and room can be made for them.

        No request overtakes another: if the first must wait, all wait. If `ahead_of` is given, only requests whose turn
        precedes its own are admitted.
        """
        while (request := self._shares.first) is not None:
            if not draft.num_tokens_left and len(draft.decodes) < self.limits.max_step_tokens:
                return  # a budget used up by decodes alone can be freed by a preemption
            if ahead_of is not None and self._shares.turn(ahead_of) < self._shares.turn(request):
                return
            if self._shares.lacks_adapter(request):
                continue
            if request in draft.preempted or request.num_pending_tokens:
                return  # freed pages must not go back, and tokens in flight are not known yet
            if not self._running.has_free_slot and not self._shares.victims(request):
                return
            cached, missing, num_found = self._running.found_pages(request)
            if self._is_too_late(request, num_found, draft.now):
                self._expire(request, draft.now)
            elif (host := self._pages.host) is not None and missing and host.is_coming(missing[0]):
                self._shares.await_page(request, missing[0])
            elif draft.page_keys.isdisjoint(missing[:1]) and self._make_room(request, cached, draft):
                self._place(request, cached, missing)
                self._plan_prefill(request, draft)
            else:  # the next page is computed in this step, so that the next can share it, or there is no room
                return

    def arrived(self, request: Request, num_pages: int, is_last: bool) -> None:
        """Books the next pages that were copied from host memory for a request. After the last it computes the rest."""
        self._running.arrived(request, num_pages)
        request.is_fetching = not is_last

    def _make_room(self, request: Request, cached: list[int], draft: Draft) -> bool:
        """Makes room for a request, preempting others if needed. False, without preemption, if it cannot fit."""
        if self._running.has_room(request, cached):
            return True
        planned = draft.prefilled()
        victims = list(itertools.takewhile(lambda victim: victim not in planned, self._shares.victims(request)))
        if not self._running.could_have_room(request, cached, victims):
            return False
        for victim in victims:
            if not self._running.has_room(request, cached):
                self._preempt_for(victim, draft)
        return True

    def _place(self, request: Request, cached: list[int], missing: list[bytes]) -> None:
        self._shares.unqueue(request)
        self._running.place(request, cached)
        if missing and self._pages.host is not None:
            request.is_fetching = self._pages.host.begin(request, missing)

    def preempt_all(self) -> None:
        """Preempts all running requests. Call it only while no step is in flight."""
        while len(self._running):
            self._preempt(self._running.last)
        self._rest()

    def begin_weights(self, key: bytes) -> None:
        """Preempts all running requests, and has page keys begin with `key`, one for each change of the weights.

        Pages of before are found no more. Call it only while no step is in flight.
        """
        self.preempt_all()
        self._weights_key = key
        for request in self._requests:
            begin_page_keys(request, self._weights_key)

    def hold_new(self, is_holding: bool) -> None:
        """Leaves requests that are added from now on out of all plans, until called with False."""
        self._is_holding = is_holding
        if not is_holding:
            self._shares.release_held()

    def _rest(self) -> None:
        """Excludes the idle time before the next step from the estimates of step time."""
        self._pace.rest()
        self.speculation.rest()

    def _preempt_for(self, request: Request, draft: Draft) -> None:
        """Preempts a request for another one, and removes it from the plan."""
        draft.undo_decode(request)
        self._preempt(request)
        draft.preempted.append(request)

    def _preempt(self, request: Request) -> None:
        """Moves a running request back to the queue. It recomputes its known tokens later, or finds them cached."""
        self._running.release(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._shares.queue(request)

    def set_blocked(self, request: Request, is_blocked: bool) -> None:
        """Leaves an unfinished request out of all plans from now on, or no longer; see `FairShares.set_blocked`."""
        if not request.is_finished:
            self._shares.set_blocked(request, is_blocked)

    def withdraw(self, request: Request) -> None:
        """Takes back what the last plan has for a request, which computes its last known token again; its token in
        flight is not to be passed to `account`. Call it before the next plan.
        """
        if not self._running.withdraw(request):
            self._preempt(request)

    def _let_leave(self) -> None:
        """Releases the pages and slots of requests whose whole output is in flight."""
        for request in self._about_to_leave:
            is_done = request.num_computed_tokens + 1 == request.max_total_tokens
            if is_done and request.slot is not None:  # otherwise it has ended or was preempted meanwhile
                self._running.release(request)
                self._leaving.add(request)
        self._about_to_leave.clear()

    def _is_too_late(self, request: Request, num_cached_pages: int, now: float) -> bool:
        """Returns whether a request can no longer produce its first token before its deadline."""
        num_tokens = request.num_known_tokens - num_cached_pages * self.limits.page_size
        num_steps = -(-num_tokens // self.limits.max_step_tokens)
        return request.deadline_seconds <= now + num_steps * self._pace.step_seconds

    def _expire(self, request: Request, now: float) -> None:
        self.finish(request, FinishReason.DEADLINE, now)
        self._expired.append(request)

    def account(self, plan: StepPlan, sampled: Sequence[int | None], now: float, step: int = 0) -> list[Progress]:
        """Books the tokens of a finished step. Call it once for each list that `Speculation.accept` returns, in order.

        Args:
          sampled: One token per request, in the order of `plan.chunks`. Tokens of requests that do not sample in this
            step are ignored.
          step: The index of the list among those that `accept` returned.

        Returns:
          One entry for each unfinished request that got a token or its end, in the same order. Requests that ended
          in the meantime are left out; their tokens are wasted. Requests that got NO_TOKEN have ended with an ERROR.
        """
        assert len(sampled) == plan.num_requests, f"{len(sampled)} tokens for {plan.num_requests} requests"
        if step == plan.num_steps - 1:  # with drafts, this is the first of several lists
            self._pace.step_ended(now, plan.num_steps, plan.num_batch_tokens, plan.prefill_position)
        progress: list[Progress] = []
        decodes: Iterable[tuple[Request, int | None]] = zip(plan.decodes, sampled, strict=False)
        if plan.decode_lengths:
            decodes = [each for each, length in zip(decodes, plan.decode_lengths, strict=True) if step < length]
        self._book(decodes, progress, now)
        if plan.prefills:
            prefills = zip(plan.prefills, sampled[len(plan.decodes) :], strict=True)
            self._book([(chunk.request, token_id) for chunk, token_id in prefills if chunk.is_sampling], progress, now)
        return progress

    def _book(self, sampled: Iterable[tuple[Request, int | None]], progress: list[Progress], now: float) -> None:
        eos_token_ids = self._eos_token_ids
        for request, token_id in sampled:
            if token_id is None:
                continue
            request.num_pending_tokens -= 1
            if request.finish_reason is not None:
                self.num_wasted_tokens += 1
                continue
            params = request.params
            is_end = (token_id in eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
            if is_end or token_id == NO_TOKEN:
                self.finish(request, FinishReason.STOP if is_end else FinishReason.ERROR, now)
                if not is_end:
                    self.num_not_finite += 1
                    self._pages.flush()  # the pages of the request may hold the NaN that led here
                progress.append((request, None))
                continue
            request.output_token_ids.append(token_id)
            request.num_known_tokens = num_known = request.num_known_tokens + 1
            if request.drafter is not None:
                request.drafter.push(token_id)
            if num_known >= request.publish_at_tokens and request.slot is not None:
                self._running.publish(request)
            if num_known == request.max_total_tokens:
                self.finish(request, FinishReason.LENGTH, now)
            progress.append((request, token_id))

    def finish(self, request: Request, reason: FinishReason, now: float) -> bool:
        """Ends a request in any state and frees its pages and slot at once. Returns False if it had already ended."""
        if request.finish_reason is not None:
            return False
        if request.slot is not None:
            self._running.release(request)
        self._leaving.discard(request)
        self._shares.close(request)
        self._deadlines.discard(request)
        del self._requests[request]
        request.finish_reason = reason
        self.num_expired += reason is FinishReason.DEADLINE
        self._pace.request_left(now, self.num_waiting, len(request.prompt_token_ids))
        return True

    def finish_at_token(self, request: Request, reason: FinishReason, now: float, *, is_dropped: bool = False) -> None:
        """Ends a request at its last token, also if `account` has ended it there. `is_dropped` removes the token."""
        if not self.finish(request, reason, now):
            request.finish_reason = reason
        if is_dropped:
            request.output_token_ids.pop()

    def stop_publishing(self) -> None:
        """Makes the unfinished requests publish no more pages."""
        for request in self._requests:
            request.publish_at_tokens = NEVER

    def audit(self) -> None:
        """Checks the invariants of queues, slots and pages. Raises AssertionError if one fails. O(requests + pages)."""
        places = {"running": set(self._running), "waiting": set(self._shares.waiting()), "leaving": self._leaving}
        assert sum(map(len, places.values())) == len(self._requests), "a request is in two states, or in none"
        assert set().union(*places.values()) == set(self._requests), "a finished request is still held"
        for request in self._requests:
            audit_request(request, is_running=request in places["running"], is_leaving=request in self._leaving)
        dated = {request for request in self._requests if request.deadline_seconds < math.inf}
        assert set(self._deadlines) == dated, "the deadlines are not those of the unfinished requests"
        self._running.audit()
        self._shares.audit()
