"""Tests where a draft model that follows the served one only at times writes its keys and values, without devices."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshserve.runtime.draft.model.drafting_runner import DraftingRunner
from meshserve.runtime.program.batch import BatchBuilder, Bucket
from meshserve.runtime.program.processors.processor_batch import ProcessorBatchBuilder
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan
from tests.runtime.simulation import make_request

LIMITS = SchedulerLimits(page_size=4, max_running=3, max_step_tokens=16, max_waiting=99, max_context=64)
NUM_PAGES = 24


class Device:
    """A model's page table and cache: the token in each place, if one was computed there."""

    def __init__(self) -> None:
        self.table = np.zeros((LIMITS.max_running, 16), int)
        self.tokens = np.full((NUM_PAGES, LIMITS.page_size), -1)
        self.num_runs = 0
        self.last_tokens = None
        self.num_pages = NUM_PAGES
        self.state = SimpleNamespace(cache=np.zeros((1, NUM_PAGES, 1, 2, LIMITS.page_size, 1)))

    def set_page_row(self, page_row: np.ndarray) -> None:
        self.table[page_row[0]] = page_row[1:]

    def run(self, bucket: Bucket, packed: np.ndarray) -> None:
        self.num_runs += 1
        fields: dict[str, Any] = {name: packed[place] for name, place in bucket.fields.items()}
        for slot, index, page in zip(fields["page_slot"], fields["page_index"], fields["page"], strict=True):
            if slot < LIMITS.max_running:
                self.table[slot, index] = page
        for token, position, owner in zip(
            fields["token_ids"], fields["positions"], fields["token_request"], strict=True
        ):
            if position >= 0:
                page = self.table[fields["slots"][owner], position // LIMITS.page_size]
                self.tokens[page, position % LIMITS.page_size] = token


@pytest.mark.parametrize("seed", range(12))
def test_what_counts_as_computed_by_a_draft_model_is_in_its_cache(seed: int):
    """Requests come and go, share prompts, and get pages in pauses; the draft model writes into no page of another.

    The host knows each token before the next step, so that the caches can be compared by the tokens' ids.
    """
    draw = random.Random(seed)
    pages = PageAllocator(NUM_PAGES)
    scheduler = Scheduler(LIMITS, pages, frozenset())
    sizes = {name: getattr(LIMITS, name) for name in ("max_running", "page_size")}
    buckets = declare_buckets(max_step_tokens=LIMITS.max_step_tokens, max_decode_steps=1, **sizes)
    processors = ProcessorBatchBuilder(max_running=3, vocab_size=1000, eos_token_ids=frozenset())
    batches = BatchBuilder(buckets, **sizes, max_request_pages=16, processors=processors, has_drafts=True)
    served, draft = Device(), Device()
    followed_by = {bucket: bucket for bucket in buckets}
    runner: Any = DraftingRunner(served, draft, None, followed_by, lambda table: table)  # type: ignore[arg-type]
    num_added, num_pauses = 0, 0
    is_drafting = True
    for _ in range(300):
        if scheduler.num_running + scheduler.num_waiting < 5:
            prompt = tuple(range(1 + num_added % 2, 2 + num_added % 2 + draw.choice([5, 9, 14])))
            scheduler.add(make_request(num_added, prompt=prompt, max_tokens=draw.randrange(4, 24), ignore_eos=True))
            num_added += 1
        if draw.random() < 0.2:
            is_drafting = not is_drafting
        plan = scheduler.plan(0.0)
        assert plan is not None
        chain = None
        if plan.decodes and is_drafting and draw.random() < 0.3:
            chain = StepPlan(decodes=plan.decodes[:1], starts=plan.starts[:1], prefills=[], num_steps=1)
        runner.prepare(plan, chain, batches, is_drafting=is_drafting)
        num_pauses += not runner.is_following
        batch = batches.build(plan)
        for page_row in batch.page_table_rows:
            runner.set_page_row(page_row)
        runner.run(batch.bucket, batch.packed)
        for request, start, num_tokens, _ in plan.chunks:
            if not runner._coverage.missed([(request, start + num_tokens)]):
                expected = np.array(request.tokens(0, start + num_tokens))
                its_pages = request.pages[: -(-len(expected) // LIMITS.page_size)]
                for device in (served, draft):
                    assert (device.tokens[its_pages].flatten()[: len(expected)] == expected).all()
        for index in range(plan.num_steps):
            scheduler.account(plan, [draw.randrange(100, 999) for _ in plan.requests], 0.0, index)
    assert num_pauses > 60 and num_added > 20 and draft.num_runs > 60
