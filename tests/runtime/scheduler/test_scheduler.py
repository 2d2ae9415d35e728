"""The scheduler's rules, one by one. Whole lives are in test_histories.py, sharing and urgency beside it."""

import pytest

from meshserve.runtime.api.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan
from tests.runtime.simulation import EOS_TOKEN_ID, Simulation, make_limits, make_request


def make_scheduler(num_pages: int = 32, **changes: int) -> Scheduler:
    return Scheduler(make_limits(**changes), PageAllocator(num_pages), frozenset({EOS_TOKEN_ID}))


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(chunk.request.request_id, *chunk[1:]) for chunk in plan.chunks]


def add_all(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


# --- what is accepted


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "fault"),
    [
        (0, 4, "^prompt: has 0 tokens"),
        (32, 4, r"^prompt: has 32 tokens; this server accepts 31 \(max_context.*Shorten it or restart"),
        (20, 9, "^sampling.max_tokens: 20 prompt tokens and up to 9 output tokens need 7 pages.*has 6. Ask for 5"),
        (25, 9, "^prompt: 25 prompt tokens and up to 7 output tokens need 8 pages.*has 6. Shorten the prompt"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(num_prompt_tokens: int, max_tokens: int, fault: str):
    scheduler = make_scheduler(num_pages=6)
    with pytest.raises(InvalidRequestError, match=fault):
        scheduler.add(make_request(1, num_prompt_tokens, max_tokens))
    assert not scheduler.has_work
    scheduler.audit()


def test_the_last_output_token_needs_no_room_in_the_cache():
    simulation = Simulation(make_limits(), num_pages=6)
    simulation.add(make_request(1, num_prompt_tokens=20, max_tokens=5, ignore_eos=True))
    simulation.drain()


def test_a_full_queue_refuses_with_a_hint():
    scheduler = make_scheduler(max_waiting=2)
    add_all(scheduler, make_request(1), make_request(2))
    with pytest.raises(QueueFullError, match=r"2 requests wait; this server queues 2 \(max_waiting\)") as caught:
        scheduler.add(make_request(3))
    assert caught.value.retry_seconds > 0
    scheduler.plan(0.0)
    scheduler.add(make_request(3))


def test_a_budget_too_small_for_all_decodes_is_no_valid_limit():
    with pytest.raises(AssertionError):
        make_scheduler(max_running=4, max_step_tokens=3)


# --- what a plan holds


def test_without_requests_there_is_no_plan():
    scheduler = make_scheduler()
    assert scheduler.plan(0.0) is None
    assert not scheduler.has_work


def test_a_plan_runs_ahead_of_the_tokens():
    scheduler = make_scheduler()
    request = make_request(1, num_prompt_tokens=3, max_tokens=9)
    scheduler.add(request)
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 3, True)]
    assert shape(scheduler.plan(0.0)) == [("r1", 3, 1, True)]
    assert (request.num_computed_tokens, request.num_pending_tokens, request.output_token_ids) == (4, 2, [])
    assert (request.num_known_tokens, request.num_tokens) == (3, 5)


def test_pages_come_as_positions_need_them():
    scheduler = make_scheduler(page_size=4)
    request = make_request(1, num_prompt_tokens=3, max_tokens=9)
    scheduler.add(request)
    counts = []
    for _ in range(6):
        scheduler.plan(0.0)
        counts.append(len(request.pages))
    assert counts == [1, 1, 2, 2, 2, 2]  # positions below 3, 4, 5, 6, 7, 8


def test_a_long_prompt_is_cut_to_the_budget_and_samples_once():
    scheduler = make_scheduler(max_step_tokens=8, max_context=64)
    request = make_request(1, num_prompt_tokens=20)
    scheduler.add(request)
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 8, False)]
    assert request.num_pending_tokens == 0
    assert shape(scheduler.plan(0.0)) == [("r1", 8, 8, False)]
    assert shape(scheduler.plan(0.0)) == [("r1", 16, 4, True)]


def test_decodes_come_first_then_the_partial_prefill_then_admissions_in_order():
    scheduler = make_scheduler(max_step_tokens=8)
    add_all(scheduler, make_request(1, 2), make_request(2, 12), make_request(3, 2), make_request(4, 9))
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 2, True), ("r2", 0, 6, False)]
    assert shape(scheduler.plan(0.0)) == [("r1", 2, 1, True), ("r3", 0, 1, False), ("r2", 6, 6, True)]
    plan = scheduler.plan(0.0)
    assert shape(plan) == [("r1", 3, 1, True), ("r2", 12, 1, True), ("r3", 1, 1, True), ("r4", 0, 5, False)]
    assert plan is not None and plan.num_batch_tokens == 8


def test_a_step_little_larger_than_a_shape_leaves_the_surplus_to_the_next():
    scheduler = make_scheduler(num_pages=64, max_step_tokens=64, max_context=80, step_sizes=(16, 32, 64))
    request, other = make_request(1, num_prompt_tokens=10), make_request(2, num_prompt_tokens=30)
    add_all(scheduler, request, other)
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 10, True), ("r2", 0, 22, False)]  # 40 are nearer to 32 than to 64
    assert (other.num_computed_tokens, other.num_pending_tokens) == (22, 0)
    assert shape(scheduler.plan(0.0)) == [("r1", 10, 1, True), ("r2", 22, 8, True)]  # below 16 padding is free
    scheduler.audit()


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens"),
    [(16, 16), (17, 16), (23, 16), (24, 24), (32, 32), (47, 32), (48, 48), (64, 64), (70, 64)],
)
def test_what_is_nearer_to_the_next_shape_is_padded(num_prompt_tokens: int, num_tokens: int):
    scheduler = make_scheduler(num_pages=64, max_step_tokens=64, max_context=80, step_sizes=(16, 32, 64))
    add_all(scheduler, make_request(1, num_prompt_tokens=num_prompt_tokens))
    assert shape(scheduler.plan(0.0)) == [("r1", 0, num_tokens, num_tokens == num_prompt_tokens)]


def test_rows_are_the_lowest_free_and_bound_the_running_requests():
    scheduler = make_scheduler(max_running=3)
    requests = [make_request(seed) for seed in range(1, 6)]
    add_all(scheduler, *requests)
    scheduler.plan(0.0)
    assert [request.slot for request in requests] == [0, 1, 2, None, None]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)
    scheduler.finish(requests[2], FinishReason.CANCELLED, 0.0)
    scheduler.finish(requests[0], FinishReason.CANCELLED, 0.0)
    scheduler.plan(0.0)
    assert [request.slot for request in requests] == [None, 1, None, 0, 2]


def test_a_request_with_all_its_output_in_flight_is_left_alone():
    scheduler = make_scheduler()
    request = make_request(1, max_tokens=1)
    scheduler.add(request)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.plan(0.0) is None
    assert scheduler.has_work
    assert (request.slot, request.pages, scheduler.num_running) == (None, [], 0)  # others may have them already
    scheduler.audit()
    assert scheduler.account(plan, [7], 0.0) == [(request, 7)]
    assert request.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work


def test_admission_is_first_come_first_served():
    """A small request does not overtake a large one that waits for pages, or the large one might wait for ever."""
    scheduler = make_scheduler(num_pages=6, page_size=4)
    add_all(scheduler, make_request(1, 8, 4), make_request(2, 16, 4), make_request(3, 1, 1))
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 8, True)]
    assert scheduler.num_waiting == 2


def test_admission_leaves_a_page_for_every_running_request():
    scheduler = make_scheduler(num_pages=5, page_size=4)
    add_all(scheduler, make_request(1, 8, 2), make_request(2, 12, 2))
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 8, True)]  # 3 pages are free, but r1 will soon need one
    scheduler = make_scheduler(num_pages=6, page_size=4)
    add_all(scheduler, make_request(1, 8, 2), make_request(2, 12, 2))
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 8, True), ("r2", 0, 8, False)]


def test_alone_a_request_may_fill_the_cache():
    scheduler = make_scheduler(num_pages=4, page_size=4)
    scheduler.add(make_request(1, 16, 1))
    assert shape(scheduler.plan(0.0)) == [("r1", 0, 16, True)]


# --- preemption


def crowd_out() -> tuple[Scheduler, list[Request], StepPlan]:
    """Two decodes fill four pages; the returned plan, still in flight, brought both to the end of their pages."""
    scheduler = make_scheduler(num_pages=4, page_size=4)
    requests = [make_request(1, 4, 8), make_request(2, 3, 8)]
    add_all(scheduler, *requests)
    plans = [scheduler.plan(0.0) for _ in range(5)]
    for plan in plans[:4]:
        assert plan is not None
        scheduler.account(plan, [5] * len(plan.chunks), 0.0)
    assert [request.num_computed_tokens for request in requests] == [8, 7]
    assert plans[4] is not None
    return scheduler, requests, plans[4]


def test_the_newest_gives_way_and_recomputes_what_is_known():
    scheduler, (older, newer), in_flight = crowd_out()
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.preempted == [newer]
    assert shape(plan) == [("r1", 8, 1, True)]
    assert (newer.slot, newer.pages, newer.num_computed_tokens, newer.num_preemptions) == (None, [], 0, 1)
    assert newer.num_pending_tokens == 1
    assert scheduler.num_preemptions == 1
    scheduler.audit()
    assert scheduler.account(in_flight, [5, 6], 0.0)[1] == (newer, 6)  # the token in flight is kept
    assert newer.output_token_ids == [5, 5, 5, 5, 6]
    scheduler.finish(older, FinishReason.CANCELLED, 0.0)
    assert shape(scheduler.plan(0.0)) == [("r2", 4, 4, True)]  # its first page was still in the cache


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    scheduler, (older, newer), in_flight = crowd_out()
    late = scheduler.plan(0.0)
    scheduler.finish(older, FinishReason.CANCELLED, 0.0)
    assert scheduler.plan(0.0) is None
    scheduler.account(in_flight, [5, 6], 0.0)
    assert shape(scheduler.plan(0.0)) == [("r2", 4, 4, True)]
    assert late is not None and shape(late) == [("r1", 8, 1, True)]


def test_a_preempted_request_goes_before_later_ones():
    scheduler, (older, newer), in_flight = crowd_out()
    later = make_request(3, 3, 2)
    scheduler.add(later)
    scheduler.plan(0.0)
    scheduler.account(in_flight, [5, 6], 0.0)
    scheduler.finish(older, FinishReason.CANCELLED, 0.0)
    assert shape(scheduler.plan(0.0)) == [("r2", 4, 4, True), ("r3", 0, 3, True)]


def test_a_preempted_request_may_end_by_its_token_in_flight():
    scheduler, (_, newer), in_flight = crowd_out()
    scheduler.plan(0.0)
    assert scheduler.account(in_flight, [5, EOS_TOKEN_ID], 0.0)[1] == (newer, None)
    assert newer.finish_reason is FinishReason.STOP
    assert scheduler.num_waiting == 0
    scheduler.audit()


def test_the_last_in_rank_keeps_what_it_has_and_sits_out():
    scheduler = make_scheduler(num_pages=4, page_size=4)
    older, newer = make_request(1, 4, 4), make_request(2, 8, 8)
    add_all(scheduler, older, newer)
    scheduler.plan(0.0)
    plan = scheduler.plan(0.0)
    assert shape(plan) == [("r1", 4, 1, True)]
    assert (newer.num_preemptions, len(newer.pages), scheduler.num_running) == (0, 2, 2)
    scheduler.audit()
    scheduler.finish(older, FinishReason.CANCELLED, 0.0)
    assert shape(scheduler.plan(0.0)) == [("r2", 8, 1, True)]


# --- what a step brings


def start(*requests: Request) -> tuple[Scheduler, StepPlan]:
    scheduler = make_scheduler()
    add_all(scheduler, *requests)
    plan = scheduler.plan(0.0)
    assert plan is not None
    return scheduler, plan


def test_an_end_token_stops_the_request_and_is_not_output():
    request = make_request(1)
    scheduler, plan = start(request)
    assert scheduler.account(plan, [EOS_TOKEN_ID], 0.0) == [(request, None)]
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.STOP, [])
    assert (request.pages, request.slot) == ([], None)


def test_an_ignored_end_token_is_a_token():
    request = make_request(1, max_tokens=2, ignore_eos=True)
    scheduler, plan = start(request)
    assert scheduler.account(plan, [EOS_TOKEN_ID], 0.0) == [(request, EOS_TOKEN_ID)]
    assert not request.is_finished


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "num_output_tokens"), [(3, 5, 5), (28, 9, 4), (31, 9, 1)])
def test_output_ends_at_max_tokens_or_with_the_context(num_prompt_tokens: int, max_tokens: int, num_output_tokens: int):
    simulation = Simulation(make_limits(max_context=32), num_pages=32)
    request = make_request(1, num_prompt_tokens, max_tokens, ignore_eos=True)
    simulation.add(request)
    simulation.drain()
    assert len(request.output_token_ids) == num_output_tokens
    assert request.finish_reason is FinishReason.LENGTH
    assert simulation.scheduler.num_wasted_tokens == 0


@pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(3, 29), (31, 1)])
def test_without_max_tokens_the_output_ends_with_the_context(num_prompt_tokens: int, num_output_tokens: int):
    simulation = Simulation(make_limits(max_context=32), num_pages=32)
    request = make_request(1, num_prompt_tokens, None, ignore_eos=True)
    simulation.add(request)
    simulation.drain()
    assert len(request.output_token_ids) == num_output_tokens
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_prompt_tokens", [3, 24])
def test_without_max_tokens_the_output_ends_with_a_cache_that_is_smaller_than_the_context(num_prompt_tokens: int):
    """A cache of 6 pages holds 24 tokens, and the last token of a request needs no room."""
    request = make_request(1, num_prompt_tokens, None)
    make_scheduler(num_pages=6).add(request)
    assert request.max_total_tokens == 25


def test_a_prompt_that_fills_the_cache_is_refused_without_max_tokens():
    with pytest.raises(InvalidRequestError, match="^prompt: 25 prompt tokens .*has 6. Shorten the prompt"):
        make_scheduler(num_pages=6).add(make_request(1, 25, None))


def test_a_stop_seen_late_wastes_one_token():
    request = make_request(1)
    scheduler, plan = start(request)
    ahead = scheduler.plan(0.0)
    assert ahead is not None
    scheduler.account(plan, [EOS_TOKEN_ID], 0.0)
    scheduler.audit()
    assert scheduler.account(ahead, [9], 0.0) == []
    assert (scheduler.num_wasted_tokens, request.output_token_ids, request.num_pending_tokens) == (1, [], 0)


def test_chunks_that_do_not_sample_bring_nothing():
    scheduler = make_scheduler(max_step_tokens=4)
    scheduler.add(make_request(1, 6))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.account(plan, [7], 0.0) == []


def test_a_token_must_come_for_every_request():
    scheduler, plan = start(make_request(1))
    with pytest.raises(AssertionError, match="2 tokens for 1 requests"):
        scheduler.account(plan, [1, 2], 0.0)


# --- ending from outside


def test_finish_works_in_every_state_and_once():
    scheduler, (running, preempted), in_flight = crowd_out()
    scheduler.plan(0.0)
    waiting = make_request(3)
    scheduler.add(waiting)
    for request in (waiting, preempted, running):
        assert scheduler.finish(request, FinishReason.DEADLINE, 0.0)
        scheduler.audit()
        assert not scheduler.finish(request, FinishReason.ERROR, 0.0)
        assert (request.finish_reason, request.pages, request.slot) == (FinishReason.DEADLINE, [], None)
    assert not scheduler.has_work
    assert scheduler.account(in_flight, [5, 5], 0.0) == []
    assert scheduler.num_wasted_tokens == 2


def test_finish_frees_room_at_once():
    scheduler = make_scheduler(num_pages=4, page_size=4)
    first, second = make_request(1, 12, 4), make_request(2, 12, 4)
    add_all(scheduler, first, second)
    scheduler.plan(0.0)
    scheduler.finish(first, FinishReason.CANCELLED, 0.0)
    assert shape(scheduler.plan(0.0)) == [("r2", 0, 12, True)]


# --- the audit sees faults


def lose_a_page(request: Request) -> None:
    request.pages.pop()


def share_a_row(request: Request) -> None:
    request.slot = 1


def forget_what_is_computed(request: Request) -> None:
    request.num_computed_tokens = 1


def come_unplaced(request: Request) -> None:
    request.slot = None


def end_behind_the_back(request: Request) -> None:
    request.finish_reason = FinishReason.STOP


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lose_a_page, "request r1 holds 1 pages, needs 2"),
        (share_a_row, "slots in use and free together"),
        (forget_what_is_computed, "request r1: 7 tokens left, 6 prefill"),
        (come_unplaced, "request r1 has the wrong state"),
        (end_behind_the_back, "request r1 is finished but still held"),
    ],
)
def test_audit_names_the_fault(spoil, fault: str):
    first = make_request(1, num_prompt_tokens=7)
    scheduler, _ = start(first, make_request(2))
    scheduler.audit()
    spoil(first)
    with pytest.raises(AssertionError, match=fault):
        scheduler.audit()
