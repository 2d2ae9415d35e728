"""Data types of a planned step, which step 4 of 10 (scheduler) passes to step 5 (batch)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..api.request import Request
from .drafts.model_drafter import UNKNOWN_DRAFT
from .limits import SchedulerLimits

# The result of a step for one request: the sampled token, or None for an end token, which is not part of the output.
# The request's `finish_reason` tells whether it is finished.
Progress = tuple[Request, int | None]


class ScheduledChunk(NamedTuple):
    """A range of positions of one request, start..start+num_tokens-1, that one step computes."""

    request: Request
    start: int
    num_tokens: int
    is_sampling: bool  # the chunk ends with the request's last token, so the step samples the next one


class Admission(NamedTuple):
    """A request that begins to compute in its slot. Its first `num_cached_pages` pages come from the prefix cache."""

    request: Request
    num_cached_pages: int
    queue_seconds: float | None  # time in the queue; None if the request had run before


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The work of one dispatch. Read `pages` and `slot` of its requests before the scheduler's next call changes them.

    The input of a decode is the token that an earlier step sampled in the same slot; the host need not know it. With
    `num_steps` above 1 there are only decodes, and each runs that many steps, or fewer if its output ends earlier. A
    decode with draft tokens computes them after its input token and samples after each.
    """

    decodes: Sequence[Request]
    starts: Sequence[int]  # the first position that each decode computes
    prefills: Sequence[ScheduledChunk]  # chunks of known tokens; those of one token come first
    num_steps: int = 1
    drafts: Sequence[list[int]] = ()  # draft tokens of each decode; empty if no decode has any
    # For each decode, its number of steps if num_steps > 1, or its number of positions if there are drafts; else empty.
    decode_lengths: Sequence[int] = ()
    # For each request with a prefill chunk that computes prompt log-probabilities, the first position that does.
    prompt_logprob_starts: Mapping[Request, int] = field(default_factory=dict)
    num_sitting_out: int = 0  # requests not decoded because their position depends on drafts in flight
    planned_seconds: float = 0.0
    admitted: Sequence[Admission] = ()
    preempted: Sequence[Request] = ()  # in the order of preemption
    is_of_drafter: bool = False  # computed by a draft model or head, which has no adapters

    @property
    def chunks(self) -> tuple[ScheduledChunk, ...]:
        """All work as chunks, in the order of the device's batch."""
        lengths = self.decode_lengths or [1] * len(self.decodes)
        decodes = zip(self.decodes, self.starts, lengths, strict=True)
        return (*(ScheduledChunk(request, start, length, True) for request, start, length in decodes), *self.prefills)

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order of the device's batch."""
        return [*self.decodes, *(chunk.request for chunk in self.prefills)]

    @property
    def num_requests(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_adapters(self) -> int:
        """The number of different adapters that its tokens are multiplied with."""
        if self.is_of_drafter:
            return 0
        return len({request.adapter_digest for request in self.requests if request.adapter_digest})

    @property
    def num_batch_tokens(self) -> int:
        """The number of tokens of one step in the device's batch."""
        return len(self.decodes) + self.num_drafts + self.num_prefill_tokens

    @property
    def num_drafts(self) -> int:
        """The number of draft tokens."""
        return sum([len(drafts) for drafts in self.drafts])

    @property
    def num_samples(self) -> int:
        """The number of tokens that a step samples: one per request in batch order, then one per draft token."""
        return self.num_requests + self.num_drafts

    @cached_property
    def sample_rows(self) -> list[list[int]]:
        """For each request, the indices of its samples: the one after its last token, then those after its drafts."""
        behind = itertools.count(self.num_requests)
        drafts = itertools.chain(self.drafts, itertools.repeat(()))
        return [
            [index, *itertools.islice(behind, len(its_drafts))]
            for index, its_drafts in zip(range(self.num_requests), drafts, strict=False)
        ]

    def draft_chain(self, num_steps: int) -> "StepPlan | None":
        """Returns the steps of the draft model that propose this plan's draft tokens, or None if it has none to."""
        indices = [index for index, drafts in enumerate(self.drafts) if UNKNOWN_DRAFT in drafts]
        if not indices:
            return None
        return StepPlan(
            decodes=[self.decodes[index] for index in indices],
            starts=[self.starts[index] for index in indices],
            prefills=[],
            num_steps=num_steps,
            decode_lengths=[len(self.drafts[index]) for index in indices],
            is_of_drafter=True,
        )

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.prefills])

    @property
    def prefill_position(self) -> int | None:
        """The middle of the longest prompt chunk; None if prompts are less than half of the step."""
        if 2 * self.num_prefill_tokens <= self.num_batch_tokens:
            return None
        longest = max(self.prefills, key=lambda chunk: chunk.num_tokens)
        return longest.start + longest.num_tokens // 2


@dataclass(kw_only=True)
class Draft:
    """A step plan under construction."""

    now: float
    num_tokens_left: int
    decodes: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_sitting_out: int = 0
    single_prefills: list[ScheduledChunk] = field(default_factory=list)
    long_prefills: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    page_keys: set[bytes] = field(default_factory=set)  # keys of the prompt pages that this step computes

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum([chunk.num_tokens for chunk in (*self.single_prefills, *self.long_prefills)])

    def begin(self, request: Request, page_size: int) -> None:
        """Adds the admission of a request whose first tokens in its slot this step computes."""
        request.is_admitted = True
        is_first = not request.num_preemptions
        if is_first:
            request.num_cached_tokens = request.num_computed_tokens
        queue_seconds = self.now - request.arrival_seconds if is_first else None
        self.admitted.append(Admission(request, request.num_computed_tokens // page_size, queue_seconds))

    def add_prefill(self, chunk: ScheduledChunk) -> None:
        self.num_tokens_left -= chunk.num_tokens
        (self.single_prefills if chunk.num_tokens == 1 else self.long_prefills).append(chunk)

    def fit(self, limits: SchedulerLimits) -> None:
        """Cuts the last prefill chunk to the next smaller bucket if that defers fewer tokens than padding would add."""
        below, above = limits.sizes_around(self.num_tokens)
        surplus = self.num_tokens - below
        if below and surplus < above - self.num_tokens and self.long_prefills:
            request, start, num_tokens, is_sampling = self.long_prefills[-1]
            if num_tokens > surplus + 1:
                self.long_prefills[-1] = ScheduledChunk(request, start, num_tokens - surplus, False)
                self.num_tokens_left += surplus
                request.num_computed_tokens -= surplus
                request.num_pending_tokens -= is_sampling

    def prefilled(self) -> set[Request]:
        """Returns the requests that this step admits or prefills."""
        chunks = (*self.single_prefills, *self.long_prefills)
        return {chunk.request for chunk in chunks} | {admission.request for admission in self.admitted}

    def undo_decode(self, request: Request) -> None:
        """Removes the decode of a request from the plan, if there is one."""
        if request in self.decodes:  # compares by identity
            index = self.decodes.index(request)
            request.num_computed_tokens = self.starts[index]
            request.num_pending_tokens -= 1
            del self.decodes[index], self.starts[index]
            self.num_tokens_left = max(self.num_tokens_left, 1)  # for the request that replaces it
