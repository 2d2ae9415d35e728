"""Weights change between two steps: no page outlives them, and new requests can be kept out until others have ended."""

import pytest

from meshserve.runtime.api.errors import QueueFullError
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from tests.runtime.simulation import EOS_TOKEN_ID, make_limits, make_request


def make_scheduler(**changes: int) -> tuple[Scheduler, PageAllocator]:
    pages = PageAllocator(32)
    return Scheduler(make_limits(**changes), pages, frozenset({EOS_TOKEN_ID})), pages


def step(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    """Runs a step in which every request samples token 7; returns the ids of the requests in it."""
    plan = scheduler.plan(now)
    scheduler.audit()
    if plan is None:
        return []
    scheduler.account(plan, [7] * plan.num_requests, now)
    scheduler.audit()
    return [chunk.request.request_id for chunk in plan.chunks]


def test_pages_of_other_weights_are_not_found():
    scheduler, _ = make_scheduler()
    first, second, third, late = (make_request(number, 12, 8, ignore_eos=True) for number in range(4))
    for request in (second, third, late):
        request.prompt_token_ids = first.prompt_token_ids
    scheduler.prepare([late])  # before the weights change, and added afterwards
    for request in (first, second):
        scheduler.prepare([request])
        scheduler.add(request)
        while not request.output_token_ids:
            step(scheduler)
    assert second.num_cached_tokens, "the prompts share no page, so this test shows nothing"
    keys = list(first.page_keys)
    scheduler.begin_weights(b"other")
    assert not first.page_keys and first.slot is None
    scheduler.finish(first, FinishReason.CANCELLED, 0.0)
    scheduler.finish(second, FinishReason.CANCELLED, 0.0)
    scheduler.add(late)
    while not late.output_token_ids:
        step(scheduler)
    assert late.num_cached_tokens == 0 and not set(late.page_keys) & set(keys)
    scheduler.prepare([third])
    scheduler.add(third)
    while not third.output_token_ids:
        step(scheduler)
    assert third.num_cached_tokens, "pages of the present weights are shared"


def test_held_requests_wait_count_and_may_end():
    scheduler, pages = make_scheduler(max_waiting=3)
    scheduler.add(make_request(1, 4, 3, ignore_eos=True))
    step(scheduler)
    scheduler.hold_new(True)
    held = [make_request(number, 4, 3, priority=number, ignore_eos=True) for number in (2, 3, 4)]
    for request in held:
        scheduler.add(request)
    assert scheduler.num_waiting == 3
    with pytest.raises(QueueFullError):
        scheduler.add(make_request(5))
    scheduler.set_blocked(held[0], True)
    scheduler.set_blocked(held[0], False)
    seen = []
    while scheduler.has_work:
        seen += step(scheduler)
    assert set(seen) == {"r1"}, "a held request runs"
    assert not step(scheduler)
    scheduler.finish(held[1], FinishReason.CANCELLED, 0.0)
    scheduler.audit()
    scheduler.hold_new(False)
    assert scheduler.has_work and scheduler.num_waiting == 2
    seen = []
    while scheduler.has_work:
        seen += step(scheduler)
    assert set(seen) == {"r2", "r4"}
    assert pages.num_free_pages == pages.num_pages
