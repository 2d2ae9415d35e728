"""Records each step in one typed record, which metrics, benchmarks and tests read.

In: plans as they are dispatched, and the scheduler's counters. Out: a `StepRecord` for each dispatch, after its tokens
are booked, on the engine's thread.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..program.batch import Bucket
from ..scheduler.page_allocator import PageAllocator
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of one dispatch. Pages are counted per device; every device holds the same number."""

    # At the time of planning:
    num_running: int  # requests that hold a slot
    max_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int  # evictable pages included
    num_evictable_pages: int  # free, but still in the prefix cache
    # Work:
    num_decodes: int  # requests that decode
    num_prefills: int  # prefill chunks
    num_prefill_tokens: int
    num_decode_tokens: int  # total over all its steps, draft tokens included
    num_draft_tokens: int = 0
    num_padding_tokens: int  # unused token positions of the bucket, over all steps
    num_steps: int  # decode steps in this dispatch
    # Admissions and preemptions:
    queue_seconds: tuple[float, ...]  # queue time of each request that ran for the first time
    num_admitted_tokens: int  # known tokens of the requests admitted to a slot
    num_cached_tokens: int  # those of num_admitted_tokens that were in the prefix cache
    num_preempted: int
    # Since the previous record:
    num_evicted_pages: int = 0
    num_wasted_tokens: int = 0  # tokens sampled for requests that had ended
    num_accepted_tokens: int = 0  # accepted draft tokens
    num_drafts_at: tuple[int, ...] = ()  # verified draft tokens, by their place after the last token
    num_accepted_at: tuple[int, ...] = ()  # those that were accepted
    saved_seconds: float = 0.0  # estimated, by draft tokens; negative if they cost more
    num_refused: int = 0  # requests refused because the queue was full
    num_expired: int = 0  # requests ended because of their deadline
    num_not_finite: int = 0  # requests ended because of logits that are NaN or infinite
    # Durations, by the engine's clock:
    host_seconds: float  # planning and batch building
    step_seconds: float = 0.0  # from dispatch until the tokens were booked; includes waiting for the previous step

    @property
    def occupancy(self) -> float:
        """The fraction of slots in use."""
        return self.num_running / self.max_running

    @property
    def padding(self) -> float:
        """The fraction of the bucket's token positions that is padding."""
        num_tokens = self.num_prefill_tokens + self.num_decode_tokens
        return self.num_padding_tokens / (num_tokens + self.num_padding_tokens)


# Receives each record on the engine's thread. Must not block and must not raise.
Record = Callable[[StepRecord], None]


class StepRecorder:
    """Creates the records of one engine. Call its methods only where reading the scheduler is safe."""

    def __init__(self, scheduler: Scheduler, pages: PageAllocator, record: Record):
        self._scheduler = scheduler
        self._pages = pages
        self._record = record
        self._counts, self._places = self._read_counts(), self._read_places()

    def planned(self, plan: StepPlan, bucket: Bucket, host_seconds: float) -> StepRecord:
        """Returns the record of a step at dispatch, without the fields that `collected` fills in."""
        scheduler, pages = self._scheduler, self._pages
        num_prefill_tokens = plan.num_prefill_tokens
        num_decode_tokens = sum(plan.decode_lengths) if plan.decode_lengths else len(plan.decodes)
        page_size = scheduler.limits.page_size
        return StepRecord(
            num_running=scheduler.num_running,
            max_running=scheduler.limits.max_running,
            num_waiting=scheduler.num_waiting,
            num_pages=pages.num_pages,
            num_free_pages=pages.num_free_pages,
            num_evictable_pages=pages.num_evictable_pages,
            num_decodes=len(plan.decodes),
            num_prefills=len(plan.prefills),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_draft_tokens=plan.num_drafts,
            num_padding_tokens=bucket.num_tokens * bucket.num_steps - num_prefill_tokens - num_decode_tokens,
            num_steps=plan.num_steps,
            queue_seconds=tuple(seconds for *_, seconds in plan.admitted if seconds is not None),
            num_admitted_tokens=sum(request.num_prefill_tokens for request, *_ in plan.admitted),
            num_cached_tokens=sum(num_pages for _, num_pages, _ in plan.admitted) * page_size,
            num_preempted=len(plan.preempted),
            host_seconds=host_seconds,
        )

    def collected(self, record: StepRecord, step_seconds: float) -> None:
        """Completes the record of a step whose tokens are booked, and passes it to `record`."""
        before, self._counts = self._counts, self._read_counts()
        places_before, self._places = self._places, self._read_places()
        drafts_at, accepted_at = (self._places - places_before).tolist()
        evicted, wasted, accepted, refused, expired, not_finite, saved = (
            now - then for now, then in zip(self._counts, before, strict=True)
        )
        self._record(
            dataclasses.replace(
                record,
                step_seconds=step_seconds,
                num_evicted_pages=evicted,
                num_wasted_tokens=wasted,
                num_accepted_tokens=accepted,
                num_drafts_at=tuple(drafts_at),
                num_accepted_at=tuple(accepted_at),
                saved_seconds=saved,
                num_refused=refused,
                num_expired=expired,
                num_not_finite=not_finite,
            )
        )

    def _read_places(self) -> np.ndarray:
        speculation = self._scheduler.speculation
        return np.array([speculation.num_drafts_at, speculation.num_accepted_at])

    def _read_counts(self) -> tuple[Any, ...]:
        scheduler = self._scheduler
        return (
            self._pages.num_evictions,
            scheduler.num_wasted_tokens,
            scheduler.speculation.num_accepted,
            scheduler.num_refused,
            scheduler.num_expired,
            scheduler.num_not_finite,
            scheduler.speculation.saved_seconds,
        )
