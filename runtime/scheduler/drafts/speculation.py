"""Speculative decoding. Serves step 4 of 10, the scheduler.

A decode may carry draft tokens, which a drafter proposes (`drafter`). The step computes them like a prompt
chunk and samples at each position. A draft token is accepted if it equals the token sampled at the position before it;
the first sampled token that differs is the last one that counts. A sample depends only on its logits, its seed and its
position, so the output is the same as without draft tokens, for greedy and for random sampling.

The host learns the number of accepted tokens one step later, so the request sits out the step in between. Draft tokens
must therefore gain more than they cost: `payoff` switches drafting by measured throughput, and `draft_counts` decides
how many there are.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ...api.request import Request
from ..limits import SchedulerLimits
from ..page_allocator import PageAllocator
from ..running import Running
from ..step_plan import Draft, StepPlan
from .draft_counts import StepCosts, draft_counts
from .drafter import Drafter, count_accepted
from .model_drafter import ModelDrafter
from .payoff import Payoffs
from .prompt_lookup import PromptLookup


class Speculation:
    """Adds draft tokens to plans and verifies them. The public counters count from the start."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator, running: Running):
        self.num_drafts = 0  # draft tokens proposed
        self.num_accepted = 0  # draft tokens accepted
        self.saved_seconds = 0.0  # estimated, by steps with drafts; negative if they cost more
        # Both by their place after the last token, from 0 on.
        self.num_drafts_at, self.num_accepted_at = [0] * limits.draft_tokens, [0] * limits.draft_tokens
        self.make_drafter: Callable[[Request], Drafter] = self._drafter  # creates the drafter of a new request
        self.is_always_on = False  # makes drafts whether they pay or not, and as many as fit; for measurements
        self.is_always_off = False  # makes none; for measurements
        self._limits = limits
        self._pages = pages
        self._running = running
        self._excluded: StepPlan | None = None  # from the measurements; the last such plan
        self._payoffs, self._costs = Payoffs(), StepCosts(limits.draft_sizes)
        self._payoff = self._payoffs.of(0)

    def drafter(self, request: Request) -> Drafter | None:
        """Returns a drafter for a new request; None if drafting is off."""
        return self.make_drafter(request) if self._limits.draft_tokens else None

    def _drafter(self, request: Request) -> Drafter:
        """Returns the drafter that the options name.

        Constrained requests have prompt lookup in any case, because their token masks are computed before the draft
        model proposes.
        """
        if self._limits.has_draft_model and request.params.constraint is None:
            return ModelDrafter()
        return PromptLookup(request.tokens(0, request.num_known_tokens), self._limits.draft_min_match)

    @property
    def is_drafting(self) -> bool:
        """Whether the step that is being planned gets draft tokens, if its requests have any and slots are left."""
        if len(self._running) >= self._limits.max_running:
            return False
        return self.is_always_on or (self._payoff.wants_drafts and not self.is_always_off)

    def begin_plan(self) -> None:
        """Chooses, for all that is asked about the next plan, whether it gets draft tokens."""
        self._payoff = self._payoffs.of(len(self._running))

    def exclude(self, plan: StepPlan) -> None:
        """Makes the time of a dispatched plan count for nothing, because it included what happens once."""
        self._excluded = plan

    def rest(self) -> None:
        """Records that there is no work, so that idle time is not measured."""
        self._payoffs.rest()

    def foresee(self, request: Request) -> list[int]:
        """Returns the draft tokens that the request's next step is expected to have, if all its tokens are known."""
        if request.drafter is None or not self.is_drafting:
            return []
        return request.drafter.guess(0, self._limits.draft_tokens)

    def awaits(self, request: Request) -> bool:
        """Returns whether a request sits out a step, because its drafter waits for its tokens in flight."""
        is_behind = request.num_pending_tokens > 0 and request.drafter is not None and request.drafter.waits_for_tokens
        return is_behind and self.is_drafting

    def keeps_step(self, num_queued: int) -> bool:
        """Returns whether the next step waits for the tokens in flight, because half of the requests or more need them.

        A step of few requests takes as long as one of all, and else those that came one step apart would take turns.
        """
        if num_queued and self._running.has_free_slot:
            return False
        is_prefilling = any(request.num_computed_tokens < request.num_prefill_tokens for request in self._running)
        num_held_up = sum(request.num_drafts > 0 or self.awaits(request) for request in self._running)
        return not is_prefilling and 2 * num_held_up >= len(self._running) > 0

    def extend(self, draft: Draft) -> list[list[int]]:
        """Proposes and books draft tokens for each decode of an otherwise complete plan; [] if there are none."""
        drafts = self._extend(draft) if self.is_drafting else []
        has_waited = self._limits.has_draft_model and self.is_drafting  # also if there was no room for drafts then
        self._payoff.plan(is_drafted=bool(drafts or draft.num_sitting_out or has_waited))
        return drafts

    def _extend(self, draft: Draft) -> list[list[int]]:
        # Each draft token takes a token and a request index of the bucket. Drafts never cause a larger bucket.
        _, num_places = self._limits.sizes_around(draft.num_tokens)
        num_requests = len(draft.decodes) + len(draft.single_prefills) + len(draft.long_prefills)
        room = min(draft.num_tokens_left, num_places - draft.num_tokens, self._limits.max_running - num_requests)
        if room <= 0:
            return []
        guesses = [self._guess(*decode) for decode in zip(draft.decodes, draft.starts, strict=True)]
        shares = [request.drafter.acceptance.share if request.drafter else 0.0 for request in draft.decodes]
        lengths = [len(guess) for guess in guesses]
        fits = self.is_always_on and sum(lengths) <= room
        counts = lengths if fits else draft_counts(shares, lengths, self._costs, num_tokens=draft.num_tokens, room=room)
        decodes = zip(draft.decodes, draft.starts, guesses, counts, strict=True)
        drafts = [self._book(request, start, guess[:count]) for request, start, guess, count in decodes]
        return drafts if any(drafts) else []

    def _guess(self, request: Request, start: int) -> list[int]:
        """Returns draft tokens to follow the token at position `start`."""
        if request.drafter is None:
            return []
        num_tokens = min(self._limits.draft_tokens, request.max_total_tokens - 2 - start)
        return request.drafter.guess(start + 1 - request.num_known_tokens, num_tokens)

    def _book(self, request: Request, start: int, drafts: list[int]) -> list[int]:
        """Books draft tokens, and assigns the page that they may need. Returns those for which there is room."""
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

    def accept(
        self,
        plan: StepPlan,
        sampled: Sequence[Sequence[int]],
        now: float,
        num_valid: Mapping[int, int] = MappingProxyType({}),
    ) -> Sequence[Sequence[int | None]]:
        """Verifies the draft tokens of a dispatch. Returns the token lists for `Scheduler.account`, one after another.

        Each list has one token per request, in batch order. Without drafts there is one list per step. With drafts,
        list i has the i-th new token of each request, or None for a request that has fewer.

        Args:
          sampled: `num_samples` tokens for each step of the plan.
          num_valid: How many of its samples count, by the index of a request: 0 if it was withdrawn. By default, all.
        """
        rounds = self._accept(plan, sampled[0], num_valid) if plan.drafts or num_valid else sampled
        if not self._limits.draft_tokens:
            return rounds
        lengths = plan.decode_lengths if plan.num_steps > 1 else [len(row) - row.count(None) for row in rounds]
        shape = plan.num_batch_tokens, plan.num_steps, bool(plan.drafts)
        is_excluded = plan.prefills or plan is self._excluded or self._costs.is_early(*shape)
        num_tokens = None if is_excluded else sum(lengths)
        num_decodes, started = len(plan.decodes) + plan.num_sitting_out, plan.planned_seconds
        is_drafted = bool(plan.drafts or plan.num_sitting_out) or (self._limits.has_draft_model and self.is_drafting)
        seconds = self._payoffs.measure(num_decodes, num_tokens, is_drafted=is_drafted, started=started, now=now)
        if plan.drafts and num_tokens is not None:
            self.saved_seconds += self._payoffs.of(num_decodes).saved_seconds(num_tokens, seconds)
            self._costs.add(plan.num_batch_tokens, seconds)
        return rounds

    def _accept(self, plan: StepPlan, sampled: Sequence[int], num_valid: Mapping[int, int]) -> list[list[int | None]]:
        rounds: list[list[int | None]] = [list(sampled[: plan.num_requests])]
        for index, num_samples in num_valid.items():
            if not num_samples:  # withdrawn, and what the plan had for it is undone already
                rounds[0][index] = None
        end = plan.num_requests
        for index, (request, drafts) in enumerate(zip(plan.decodes, plan.drafts, strict=False)):
            start, end = end, end + len(drafts)  # range of the samples after its drafts
            num_samples = num_valid.get(index, 1 + len(drafts))
            if drafts and num_samples:
                tokens = [sampled[index], *sampled[start:end]][:num_samples]
                count = count_accepted(drafts[: num_samples - 1], tokens)
                rounds += [[None] * plan.num_requests for _ in range(len(rounds), count + 1)]
                for each in range(1, count + 1):
                    rounds[each][index] = tokens[each]
                self._settle(request, len(drafts) - count)
                self._count(len(drafts), count)
                if num_samples > 1 and request.drafter is not None:
                    request.drafter.acceptance.add(num_samples - 1, count)
                    request.drafter.judge(num_samples - 1, count)
        return rounds

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_accepted += num_accepted
        for place in range(num_drafts):
            self.num_drafts_at[place] += 1
            self.num_accepted_at[place] += place < num_accepted

    def _settle(self, request: Request, num_rejected: int) -> None:
        """Reverses the bookkeeping of rejected draft tokens."""
        request.num_drafts = 0
        request.num_pending_tokens -= num_rejected
        if request.slot is not None:  # otherwise it has ended or was preempted meanwhile
            request.num_computed_tokens -= num_rejected
            self._running.shrink(request)
