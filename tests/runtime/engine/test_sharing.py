"""Tests the sharing of pages between requests: which pages are found, which tokens are computed, and the cost."""

import pytest

from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan
from tests.runtime.simulation import EOS_TOKEN_ID, Simulation, make_limits, make_request

PROMPT = tuple(range(1, 11))  # two and a half pages of 4 tokens


def make_scheduler(num_pages: int = 32, **changes: float) -> Scheduler:
    return Scheduler(make_limits(**changes), PageAllocator(num_pages), frozenset({EOS_TOKEN_ID}))


def prefills(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.prefills]


def ask(scheduler: Scheduler, seed: int, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    request = make_request(seed, max_tokens=4, prompt=prompt, **fields)
    scheduler.add(request)
    return request


def test_full_pages_are_shared_and_the_rest_is_computed():
    scheduler = make_scheduler()
    first = ask(scheduler, 1)
    scheduler.plan(0.0)
    second, third = ask(scheduler, 2), ask(scheduler, 3, (*PROMPT[:5], 30, 31, 32, 33))
    plan = scheduler.plan(0.0)
    assert prefills(plan) == [("r2", 8, 2), ("r3", 4, 5)]
    assert second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    assert third.pages[0] == first.pages[0] and third.pages[1] != first.pages[1]
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 8, 4)
    assert plan is not None and [admission.num_cached_pages for admission in plan.admitted] == [2, 1]
    scheduler.audit()


def test_the_last_token_is_always_computed():
    scheduler = make_scheduler()
    ask(scheduler, 1, PROMPT[:8])
    scheduler.plan(0.0)
    ask(scheduler, 2, PROMPT[:8])
    assert prefills(scheduler.plan(0.0)) == [("r2", 4, 4)]


def test_who_comes_in_the_same_step_waits_for_the_pages_being_computed():
    scheduler = make_scheduler()
    ask(scheduler, 1)
    ask(scheduler, 2)
    assert prefills(scheduler.plan(0.0)) == [("r1", 0, 10)]
    assert prefills(scheduler.plan(0.0)) == [("r2", 8, 2)]


def test_a_long_prefix_is_followed_chunk_by_chunk():
    scheduler = make_scheduler(max_step_tokens=8, max_context=64)
    prompt = tuple(1 + index % 30 for index in range(20))
    ask(scheduler, 1, prompt)
    ask(scheduler, 2, (*prompt, 31, 32))
    work = [prefills(scheduler.plan(0.0)) for _ in range(4)]
    assert work == [[("r1", 0, 8)], [("r1", 8, 8)], [("r1", 16, 4)], [("r2", 20, 2)]]


def test_salts_keep_requests_apart():
    scheduler = make_scheduler()
    ask(scheduler, 1, cache_salt="a")
    scheduler.plan(0.0)
    ask(scheduler, 2, cache_salt="b")
    ask(scheduler, 3)
    ask(scheduler, 4, cache_salt="a")
    assert prefills(scheduler.plan(0.0)) == [("r2", 0, 10), ("r3", 0, 5)]
    assert prefills(scheduler.plan(0.0)) == [("r3", 5, 5), ("r4", 8, 2)]


def test_a_conversation_finds_its_whole_history():
    """Includes the output of the first turn, as far as its pages are full."""
    simulation = Simulation(make_limits(page_size=4, max_context=64, max_step_tokens=32), num_pages=32)
    first = make_request(1, max_tokens=9, ignore_eos=True, prompt=PROMPT)
    simulation.add(first)
    simulation.drain()
    history = first.tokens(0, first.num_known_tokens)
    assert len(history) == 19
    second = make_request(2, max_tokens=1, ignore_eos=True, prompt=(*history, 5, 6))
    simulation.add(second)
    simulation.drain()
    assert second.num_cached_tokens == 16  # out of 19: the last token's key and value were never computed
    third = make_request(3, max_tokens=1, ignore_eos=True, prompt=(*history, 5, 6))
    simulation.add(third)
    simulation.drain()
    assert third.num_cached_tokens == 20


def test_a_page_is_not_shared_before_its_tokens_are_known():
    scheduler = make_scheduler()
    request = ask(scheduler, 1, PROMPT[:3])
    plans = [scheduler.plan(0.0) for _ in range(3)]
    assert request.num_computed_tokens == 5 and request.num_published_pages == 0
    assert plans[0] is not None
    scheduler.account(plans[0], [7], 0.0)
    assert request.num_published_pages == 1  # positions 0 to 3; the token at 3 is 7
    ask(scheduler, 2, (*PROMPT[:3], 7, 9))
    assert prefills(scheduler.plan(0.0)) == [("r2", 4, 1)]


def test_a_preempted_request_finds_its_own_pages():
    simulation = Simulation(make_limits(max_running=2, priority_seconds=100.0), num_pages=32)
    low = make_request(1, max_tokens=20, ignore_eos=True, prompt=PROMPT)
    other = make_request(2, max_tokens=20, ignore_eos=True, prompt=PROMPT[:1])
    simulation.add(other)
    simulation.add(low)
    for _ in range(6):
        simulation.step()
    simulation.add(make_request(3, max_tokens=2, priority=1))
    simulation.drain()
    assert low.num_preemptions == 1
    assert simulation.num_prefill_tokens < 10 + 1 + 3 + 8  # recomputes at most one page and what was in flight
    assert low.num_cached_tokens == 0  # no other request had computed any of its prompt


def test_samples_of_one_prompt_compute_it_once():
    simulation = Simulation(make_limits(max_running=8), num_pages=32)
    samples = [make_request(seed, max_tokens=6, ignore_eos=True, prompt=PROMPT, index=seed) for seed in range(4)]
    simulation.add(*samples)
    simulation.step()
    simulation.step()
    assert simulation.num_prefill_tokens == 10 + 3 * 2
    assert len({tuple(sample.pages[:2]) for sample in samples}) == 1
    assert len({sample.pages[2] for sample in samples}) == 4
    simulation.drain()


def test_samples_are_accepted_all_or_none():
    scheduler = make_scheduler(max_waiting=3)
    ask(scheduler, 1)
    with pytest.raises(Exception, match="1 requests wait; this server queues 3"):
        scheduler.add(*(make_request(seed) for seed in (2, 3, 4)))
    assert (scheduler.num_waiting, scheduler.num_refused) == (1, 3)
    with pytest.raises(Exception, match="n: is 4; this server queues 3"):
        scheduler.add(*(make_request(seed) for seed in (2, 3, 4, 5)))


def test_shared_pages_are_free_when_the_last_holder_ends():
    pages = PageAllocator(32)
    scheduler = Scheduler(make_limits(), pages, frozenset({EOS_TOKEN_ID}))
    first = ask(scheduler, 1)
    scheduler.plan(0.0)
    second = ask(scheduler, 2)
    scheduler.plan(0.0)
    scheduler.finish(first, FinishReason.CANCELLED, 0.0)
    scheduler.audit()
    assert pages.num_free_pages == 32 - 3
    scheduler.finish(second, FinishReason.CANCELLED, 0.0)
    assert (pages.num_free_pages, pages.num_evictable_pages) == (32, 2)


def test_without_the_cache_nothing_is_kept():
    simulation = Simulation(make_limits(has_prefix_cache=False), num_pages=32)
    for seed in (1, 2):
        simulation.add(make_request(seed, prompt=PROMPT))
        simulation.drain()
    assert (simulation.num_prefill_tokens, simulation.allocator.num_evictable_pages) == (20, 0)


@pytest.mark.parametrize(("has_prefix_cache", "num_tokens"), [(False, 64 * 1016), (True, 1000 + 64 * 16)])
def test_64_requests_compute_a_shared_prefix_once(has_prefix_cache: bool, num_tokens: int):
    limits = make_limits(
        page_size=8, max_running=16, max_step_tokens=256, max_waiting=64, max_context=2048,
        has_prefix_cache=has_prefix_cache,
    )  # fmt: skip
    simulation = Simulation(limits, num_pages=4096)
    prefix = tuple(1 + index * index % 39 for index in range(1000))
    for seed in range(1, 65):
        own = (1 + seed // 39, *(1 + (seed * index) % 39 for index in range(1, 16)))
        simulation.add(make_request(seed, max_tokens=4, prompt=prefix + own))
    simulation.drain()
    assert num_tokens <= simulation.num_prefill_tokens <= num_tokens * 1.05
