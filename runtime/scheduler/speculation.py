"""Speculative decoding with prompt lookup. Serves step 4 of 10, the scheduler.

A decode may carry draft tokens: those that followed an earlier occurrence of its last few tokens in its own text
(Saxena, "Prompt Lookup Decoding", 2023). The step computes them like a prompt chunk and samples at each position. A
draft token is accepted if it equals the token sampled at the position before it; the first sampled token that differs
is the last one that counts. A sample depends only on its logits, its seed and its position, so the output is the same
as without draft tokens, for greedy and for random sampling.

The host learns the number of accepted tokens one step later, so the request sits out the step in between. Draft tokens
must therefore gain more than they cost. A request whose drafts are rejected needs ever longer matches (`Drafter`), and
drafting as a whole is switched by measured throughput (`_Payoff`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..api.request import Request
from .limits import SchedulerLimits
from .page_allocator import PageAllocator
from .prompt_lookup import Drafter
from .running import Running
from .step_plan import Draft, StepPlan

_TRIAL_STEPS = 16  # steps with drafts, then as many without, before the faster is chosen
_PROBE_EVERY = 512  # steps after which the slower alternative is measured again
_PROBE_STEPS = 8  # length of that measurement
_FADE = 0.95  # decay of the measurements per step


@dataclass
class _Rate:
    """Exponentially decayed totals of tokens and seconds over recent steps."""

    num_steps: int = 0
    num_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self.num_tokens = self.num_tokens * _FADE + num_tokens
        self.seconds = self.seconds * _FADE + seconds


@dataclass
class _Payoff:
    """Compares the throughput with and without draft tokens, for steps with a similar number of decodes."""

    # Includes steps that a request sat out because of drafts, and the step after each, whose time they also affect.
    drafted: _Rate = field(default_factory=_Rate)
    plain: _Rate = field(default_factory=_Rate)

    @property
    def wants_drafts(self) -> bool:
        if self.drafted.num_steps < _TRIAL_STEPS:
            return True
        if self.plain.num_steps < _TRIAL_STEPS:
            return False
        pays = self.drafted.num_tokens * self.plain.seconds >= self.plain.num_tokens * self.drafted.seconds
        num_steps = self.drafted.num_steps + self.plain.num_steps
        return pays != (num_steps % _PROBE_EVERY < _PROBE_STEPS)


class Speculation:
    """Adds draft tokens to plans and verifies them. The public counters count from the start."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator, running: Running):
        self.num_drafts = 0  # draft tokens proposed
        self.num_accepted = 0  # draft tokens accepted
        self._limits = limits
        self._pages = pages
        self._running = running
        self._payoffs: defaultdict[int, _Payoff] = defaultdict(_Payoff)  # by the bit length of the number of decodes
        self._last: float | None = None  # end of the last step; None after idle time
        self._was_drafted = False  # whether that step had drafts, or a request sat it out

    def drafter(self, request: Request) -> Drafter | None:
        """Returns a drafter for a new request; None where each token changes what may follow, or drafting is off."""
        params = request.params
        if params.has_adjustments or params.constraint is not None or not self._limits.draft_tokens:
            return None
        return Drafter(request.tokens(0, request.num_known_tokens), self._limits.draft_min_match)

    def rest(self) -> None:
        """Records that there is no work, so that idle time is not measured."""
        self._last = None

    def extend(self, draft: Draft) -> list[list[int]]:
        """Proposes and books draft tokens for each decode of an otherwise complete plan; [] if there are none."""
        payoff = self._payoffs[_power(len(draft.decodes) + draft.num_sitting_out)]
        if not payoff.wants_drafts:
            return []
        # Each draft token takes a token and a request index of the bucket. Drafts never cause a larger bucket.
        _, num_places = self._limits.sizes_around(draft.num_tokens)
        num_requests = len(draft.decodes) + len(draft.single_prefills) + len(draft.long_prefills)
        room = min(draft.num_tokens_left, num_places - draft.num_tokens, self._limits.max_running - num_requests)
        drafts = []
        for request, start in zip(draft.decodes, draft.starts, strict=True):
            drafts.append(self._guess(request, start, room) if room > 0 else [])
            room -= len(drafts[-1])
        return drafts if any(drafts) else []

    def _guess(self, request: Request, start: int, room: int) -> list[int]:
        """Returns draft tokens to follow the token at position `start`, and assigns the page that they may need."""
        if request.drafter is None:
            return []
        num_tokens = min(self._limits.draft_tokens, room, request.max_total_tokens - 2 - start)
        drafts = request.drafter.guess(start + 1 - request.num_known_tokens, num_tokens)
        num_lacking = start + 1 + len(drafts) - request.num_page_positions
        if num_lacking > 0:
            if self._pages.num_free_pages > len(self._running):  # reserves one page per running request
                self._running.assign(request, self._pages.allocate(1))
            else:
                del drafts[-num_lacking:]
        request.num_drafts = len(drafts)
        request.num_computed_tokens += len(drafts)
        request.num_pending_tokens += len(drafts)
        self.num_drafts += len(drafts)
        return drafts

    def accept(self, plan: StepPlan, sampled: Sequence[Sequence[int]], now: float) -> Sequence[Sequence[int | None]]:
        """Implements `Scheduler.accept`."""
        rounds = self._accept(plan, sampled[0]) if plan.drafts else sampled
        if not plan.prefills:
            num_tokens = sum(plan.decode_lengths) if plan.num_steps > 1 else sum(_num_tokens(each) for each in rounds)
            self._measure(plan, num_tokens, now)
        self._last, self._was_drafted = now, _is_drafted(plan)
        return rounds

    def _accept(self, plan: StepPlan, sampled: Sequence[int]) -> list[list[int | None]]:
        first, behind = sampled[: plan.num_requests], iter(sampled[plan.num_requests :])
        rounds: list[list[int | None]] = [list(first)]
        for index, (request, drafts) in enumerate(zip(plan.decodes, plan.drafts, strict=False)):
            tokens = [first[index], *(next(behind) for _ in drafts)]
            num_accepted = 0
            while num_accepted < len(drafts) and tokens[num_accepted] == drafts[num_accepted]:
                num_accepted += 1
                if len(rounds) == num_accepted:
                    rounds.append([None] * plan.num_requests)
                rounds[num_accepted][index] = tokens[num_accepted]
            if drafts:
                self._settle(request, len(drafts), num_accepted)
        return rounds

    def _settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Reverses the bookkeeping of rejected draft tokens."""
        num_rejected = num_drafts - num_accepted
        request.num_drafts = 0
        request.num_pending_tokens -= num_rejected
        if request.slot is not None:  # otherwise it has ended or was preempted meanwhile
            request.num_computed_tokens -= num_rejected
            self._running.shrink(request)
        assert request.drafter is not None, request.request_id
        request.drafter.judge(num_drafts, num_accepted)
        self.num_accepted += num_accepted

    def _measure(self, plan: StepPlan, num_tokens: int, now: float) -> None:
        payoff = self._payoffs[_power(len(plan.decodes) + plan.num_sitting_out)]
        rate = payoff.drafted if _is_drafted(plan) or self._was_drafted else payoff.plain
        rate.add(num_tokens, now - (plan.planned_seconds if self._last is None else self._last))


def _is_drafted(plan: StepPlan) -> bool:
    return bool(plan.drafts or plan.num_sitting_out)


def _power(number: int) -> int:
    return number.bit_length()


def _num_tokens(tokens: Sequence[int | None]) -> int:
    return sum(token is not None for token in tokens)
