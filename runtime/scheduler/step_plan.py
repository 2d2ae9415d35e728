"""What step 4 of 10 hands to step 5: the nouns of a step's work."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..api.request import Request

# What a step brought for one request: a token, or None where it sampled an end token, which is not part of the output.
# The request is finished if its `finish_reason` says so.
Progress = tuple[Request, int | None]


class Chunk(NamedTuple):
    """Positions start..start+num_tokens-1 of a request, computed by one step."""

    request: Request
    start: int
    num_tokens: int
    is_sampling: bool  # the chunk ends with the request's last token, so the step samples the next one


class Admission(NamedTuple):
    """A request that got a row. Its first `num_cached_pages` pages hold what earlier steps computed."""

    request: Request
    num_cached_pages: int
    queue_seconds: float | None  # how long it waited; None if it had run before


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One dispatch. Read `pages` and `slot` of its requests before the scheduler's next call: it may change them.

    A decode feeds the token that an earlier step sampled in the same row; the host need not know it. With `num_steps`
    above 1 there are only decodes, and each runs that many steps, or fewer if its output ends before. A decode with
    drafts feeds these behind its token, and samples after each.
    """

    decodes: Sequence[Request]
    starts: Sequence[int]  # of each decode: the position it computes (first)
    prefills: Sequence[Chunk]  # known tokens; chunks of one token first
    num_steps: int = 1
    drafts: Sequence[Sequence[int]] = ()  # of each decode, if any has some: tokens that may follow the one it feeds
    # Of each decode, where num_steps is above 1: its steps; where there are drafts: its positions.
    decode_lengths: Sequence[int] = ()
    num_sitting_out: int = 0  # requests whose position depends on drafts in flight
    planned_seconds: float = 0.0
    admitted: Sequence[Admission] = ()
    preempted: Sequence[Request] = ()  # lost pages and row for others that go before them, the last in rank first

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All work, in the order of the device's batch."""
        lengths = self.decode_lengths or [1] * len(self.decodes)
        decodes = zip(self.decodes, self.starts, lengths, strict=True)
        return (*(Chunk(request, start, length, True) for request, start, length in decodes), *self.prefills)

    @property
    def requests(self) -> list[Request]:
        """In the order of the device's batch."""
        return [*self.decodes, *(chunk.request for chunk in self.prefills)]

    @property
    def num_requests(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_batch_tokens(self) -> int:
        """Of one step, as the device's batch counts them."""
        return len(self.decodes) + self.num_drafts + self.num_prefill_tokens

    @property
    def num_drafts(self) -> int:
        """Tokens."""
        return sum([len(drafts) for drafts in self.drafts])

    @property
    def num_samples(self) -> int:
        """Tokens that a step samples: one for each request, in their order, then one behind each draft."""
        return self.num_requests + self.num_drafts

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.prefills])


@dataclass(kw_only=True)
class Draft:
    """A plan in the making."""

    now: float
    num_tokens_left: int
    decodes: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_sitting_out: int = 0
    single_prefills: list[Chunk] = field(default_factory=list)
    long_prefills: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    page_keys: set[bytes] = field(default_factory=set)  # of prompt pages that this very step computes

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum([chunk.num_tokens for chunk in (*self.single_prefills, *self.long_prefills)])

    def add_prefill(self, chunk: Chunk) -> None:
        self.num_tokens_left -= chunk.num_tokens
        (self.single_prefills if chunk.num_tokens == 1 else self.long_prefills).append(chunk)

    def undo_decode(self, request: Request) -> None:
        """Takes a request's decode, if it has one here, back out of the plan."""
        if request in self.decodes:  # compares identities
            index = self.decodes.index(request)
            request.num_computed_tokens = self.starts[index]
            request.num_pending_tokens -= 1
            del self.decodes[index], self.starts[index]
            self.num_tokens_left = max(self.num_tokens_left, 1)  # for the one that takes its place
