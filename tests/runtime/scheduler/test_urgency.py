"""Priorities, deadlines, hints to refused callers, and several decode steps in one dispatch."""

import math
import random
from collections.abc import Iterable

import pytest

from meshserve.runtime.api.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import FinishReason, Request, RequestOptions
from meshserve.runtime.scheduler.pace import Pace
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.ranked_queue import RankedQueue
from meshserve.runtime.scheduler.scheduler import Scheduler
from tests.runtime.simulation import EOS_TOKEN_ID, Simulation, make_limits, make_request


def make_scheduler(num_pages: int = 32, **changes: float) -> Scheduler:
    return Scheduler(make_limits(**changes), PageAllocator(num_pages), frozenset({EOS_TOKEN_ID}))


def planned(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    plan = scheduler.plan(now)
    return [chunk.request.request_id for chunk in plan.chunks] if plan is not None else []


# --- priority


def test_larger_priority_goes_first():
    scheduler = make_scheduler(max_running=2)
    for seed, priority in ((1, 0), (2, -1), (3, 5), (4, 0)):
        scheduler.add(make_request(seed, priority=priority))
    assert planned(scheduler) == ["r3", "r1"]


def test_a_long_wait_outweighs_priority():
    scheduler = make_scheduler(max_running=1, priority_seconds=10.0)
    scheduler.add(make_request(1, arrival_seconds=0.0))
    scheduler.add(make_request(2, arrival_seconds=11.0, priority=1))
    assert planned(scheduler, 11.0) == ["r1"]


def test_a_prior_request_takes_the_row_of_the_last_in_rank():
    scheduler = make_scheduler(max_running=2)
    first, second, prior = make_request(1), make_request(2), make_request(3, priority=1)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan(0.0)
    scheduler.add(prior)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.preempted == [second]
    assert [chunk.request for chunk in plan.chunks] == [first, prior]  # the decode it had in this plan is undone
    assert (second.num_pending_tokens, second.num_computed_tokens) == (1, 0)
    scheduler.audit()


def test_nobody_gives_way_in_vain():
    """The prior request would not fit beside the one before it, whoever else gave way."""
    scheduler = make_scheduler(num_pages=8, max_running=4)
    biggest, small = make_request(1, 20, 4, priority=2), make_request(2, 2, 2)
    scheduler.add(biggest)
    scheduler.add(small)
    for _ in range(3):
        scheduler.plan(0.0)
    scheduler.add(make_request(3, 16, 4, priority=1))
    plan = scheduler.plan(0.0)
    assert plan is not None and not plan.preempted


def test_a_prior_request_gets_a_turn_even_if_decodes_fill_the_budget():
    scheduler = make_scheduler(max_running=2, max_step_tokens=2)
    for seed in (1, 2):
        scheduler.add(make_request(seed, num_prompt_tokens=1, max_tokens=9))
    scheduler.plan(0.0)
    scheduler.add(make_request(3, priority=1))
    assert planned(scheduler) == ["r1", "r3"]


def test_equals_never_give_way_on_arrival():
    scheduler = make_scheduler(max_running=1)
    scheduler.add(make_request(1, max_tokens=9))
    scheduler.plan(0.0)
    scheduler.add(make_request(2))
    assert planned(scheduler) == ["r1"]


# --- the bound on prefill beside decodes


def test_prefill_beside_decodes_is_bounded():
    scheduler = make_scheduler(max_step_tokens=16, max_prefill_tokens=3)
    scheduler.add(make_request(1, num_prompt_tokens=12, max_tokens=9))
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.num_prefill_tokens == 12  # no request decodes: all of the budget
    scheduler.add(make_request(2, num_prompt_tokens=20))
    plan = scheduler.plan(0.0)
    assert plan is not None and (len(plan.decodes), plan.num_prefill_tokens) == (1, 3)


def test_prefill_beside_decodes_is_shorter_while_few_prompt_tokens_are_left():
    scheduler = make_scheduler(max_step_tokens=32, max_prefill_tokens=6, low_load_prefill_tokens=3)
    scheduler.add(make_request(1, num_prompt_tokens=8, max_tokens=40))
    assert scheduler.plan(0.0) is not None
    scheduler.add(make_request(2, num_prompt_tokens=10, max_tokens=40))
    sizes = []
    for num_prompt_tokens in (0, 8, 0, 0, 0, 0):  # 10 left, then 7 and 8 that wait, more than twice the bound
        if num_prompt_tokens:
            scheduler.add(make_request(3, num_prompt_tokens=num_prompt_tokens, max_tokens=40))
        plan = scheduler.plan(0.0)
        assert plan is not None and plan.decodes
        sizes.append(plan.num_prefill_tokens)
    assert sizes == [3, 6, 3, 3, 3, 0]


def test_prefill_beside_decodes_is_longer_while_many_requests_wait_for_their_first_tokens():
    scheduler = make_scheduler(
        400, max_running=40, max_waiting=40, max_step_tokens=64, max_prefill_tokens=16, low_load_prefill_tokens=4
    )
    scheduler.add(*(make_request(seed, num_prompt_tokens=1, max_tokens=20) for seed in range(32)))
    assert scheduler.plan(0.0) is not None
    scheduler.add(*(make_request(seed, num_prompt_tokens=6, max_tokens=20) for seed in range(40, 45)))
    sizes = []
    for _ in range(6):  # 5 requests, more than an eighth of the 32 that decode; then 3 with 14 tokens left
        plan = scheduler.plan(0.0)
        assert plan is not None
        sizes.append(plan.num_prefill_tokens)
    assert sizes == [16, 4, 4, 4, 2, 0]


def test_long_cached_prompts_that_wait_are_looked_up_in_few_pages(monkeypatch: pytest.MonkeyPatch):
    scheduler = make_scheduler(
        300, max_running=30, max_waiting=30, max_step_tokens=1000, max_prefill_tokens=217, low_load_prefill_tokens=3,
        max_context=1000,
    )  # fmt: skip
    prompt = tuple(1 + index % 30 for index in range(796))
    scheduler.add(make_request(1, prompt=(*prompt, 31), max_tokens=40))
    assert scheduler.plan(0.0) is not None
    waiting = [make_request(seed, prompt=(*prompt, *[seed] * seed), max_tokens=9) for seed in range(1, 30)]
    scheduler.add(*waiting)
    assert {scheduler._running.found_pages(request)[2] for request in waiting} == {199}
    assert [scheduler._running.num_left(request) for request in waiting] == list(range(1, 30))
    looked_up: list[bytes] = []
    match = PageAllocator.match

    def counted(pages: PageAllocator, keys: Iterable[bytes]) -> list[int]:
        looked_up.extend(keys := list(keys))
        return match(pages, keys)

    monkeypatch.setattr(PageAllocator, "match", counted)
    assert not scheduler._running.is_load_low([], 8 * 29)  # 435 tokens are left
    scheduler.finish(waiting[0], FinishReason.CANCELLED, 0.0)
    assert scheduler._running.is_load_low([], 8 * 29)
    assert len(waiting) < len(looked_up) < 20 * len(waiting)


def test_bounded_prefill_and_decodes_fill_a_step_size():
    limits = make_limits(
        page_size=16, max_running=64, max_waiting=64, max_context=64, max_step_tokens=512, max_prefill_tokens=256,
        step_sizes=(64, 128, 256, 512),
    )  # fmt: skip
    simulation = Simulation(limits, num_pages=256)
    simulation.add(*[make_request(seed, num_prompt_tokens=32, max_tokens=30, ignore_eos=True) for seed in range(64)])
    mixed = []
    while simulation.scheduler.num_waiting:
        plan = simulation.dispatch()
        assert plan is not None
        if plan.decodes and simulation.scheduler.num_waiting:
            mixed.append(plan.num_batch_tokens)
        simulation.collect()
    assert mixed == [256] * 4  # 256 and the decodes would be padded to 512


def test_prefill_chunks_of_several_requests_share_a_step():
    scheduler = make_scheduler(max_step_tokens=16, max_running=8)
    for seed, length in ((1, 2), (2, 5), (3, 6), (4, 9)):
        scheduler.add(make_request(seed, num_prompt_tokens=length))
    plan = scheduler.plan(0.0)
    assert plan is not None and [chunk.num_tokens for chunk in plan.prefills] == [2, 5, 6, 3]


# --- deadlines


def test_a_passed_deadline_ends_a_request_wherever_it_stands():
    scheduler = make_scheduler(max_running=1)
    running, waiting = make_request(1, deadline_seconds=5.0), make_request(2, deadline_seconds=5.0)
    scheduler.add(running)
    scheduler.add(waiting)
    assert planned(scheduler, 4.9) == ["r1"]
    assert planned(scheduler, 5.0) == []
    assert scheduler.take_expired() == [running, waiting] and scheduler.take_expired() == []
    assert {running.finish_reason, waiting.finish_reason} == {FinishReason.DEADLINE}
    assert scheduler.num_expired == 2 and not scheduler.has_work
    scheduler.audit()


def test_a_request_whose_caller_gives_up_at_its_deadline_counts_as_expired():
    scheduler = make_scheduler()
    request = make_request(1, deadline_seconds=5.0)
    scheduler.add(request)
    assert scheduler.finish(request, FinishReason.DEADLINE, 5.0) and scheduler.num_expired == 1
    assert not scheduler.finish(request, FinishReason.DEADLINE, 5.0) and scheduler.num_expired == 1


def test_a_deadline_that_cannot_be_met_costs_no_step():
    """Steps take a second, the prompt needs three of them, and two and a half are left."""
    scheduler = make_scheduler(max_step_tokens=8, max_context=64)
    scheduler.add(make_request(1, max_tokens=30, ignore_eos=True))
    for now in range(4):
        plan = scheduler.plan(float(now))
        assert plan is not None
        scheduler.account(plan, [7], float(now))
    late, in_time = (make_request(seed, 24, deadline_seconds=5.5 + seed, arrival_seconds=4.0) for seed in (1, 2))
    late.request_id = "late"
    scheduler.add(late)
    scheduler.add(in_time)
    assert planned(scheduler, 4.0) == ["r1", "r2"]
    assert scheduler.take_expired() == [late] and late.num_computed_tokens == 0


def test_a_pause_is_not_taken_for_the_time_of_a_step():
    """One step since the start, ten idle minutes, and half a minute for more than two steps."""
    scheduler = make_scheduler(max_step_tokens=8, max_context=64)
    for now in (0.0, 600.0):
        scheduler.add(make_request(int(now), max_tokens=1, arrival_seconds=now))
        plan = scheduler.plan(now)
        assert plan is not None
        scheduler.account(plan, [7], now + 0.1)
    scheduler.add(make_request(1, 24, deadline_seconds=631.0, arrival_seconds=601.0))
    assert planned(scheduler, 601.0) == ["r1"]


# --- the queue


def test_a_ranked_queue_forgets_those_who_left():
    queue: RankedQueue[int] = RankedQueue()
    rng = random.Random(0)
    requests = [make_request(seed) for seed in range(1000)]
    keys = {request: rng.randrange(100) for request in requests}
    for request in requests:
        queue.push(keys[request], request)
    for request in requests[:990]:
        queue.discard(request)
        queue.discard(request)
    assert len(queue) == len(list(queue)) == 10
    assert len(queue._heap) <= 2 * 10 + 64
    order = []
    while (first := queue.first) is not None:
        order.append(first)
        queue.discard(first)
    assert order == sorted(requests[990:], key=keys.__getitem__)


def test_a_request_queues_once():
    queue: RankedQueue[int] = RankedQueue()
    request = make_request(1)
    queue.push(2, request)
    with pytest.raises(ValueError, match="in this queue already"):
        queue.push(1, request)
    queue.discard(request)
    queue.push(1, request)
    assert queue.first is request and len(queue) == 1


def test_refused_callers_are_told_to_come_back_at_the_rate_of_service():
    pace = Pace()
    for hundredth in range(1000):
        pace.request_left(hundredth / 100 * 0.25, 1)  # 400 a second
    hints = [pace.retry_seconds(2.5) for _ in range(400)]
    assert hints == sorted(hints)
    assert hints[-1] == pytest.approx(1.0, rel=0.15)
    assert pace.retry_seconds(100.0) <= 60.0


def test_the_hint_of_a_lasting_overload_settles():
    """40 leave a second, 120 are refused, 20 wait: half a second's queue is forgotten within a second."""
    pace, hints = Pace(), []
    for tick in range(120 * 60):
        now = tick / 120
        if tick % 3 == 0:
            pace.request_left(now, 20)
        hints.append(pace.retry_seconds(now, num_waiting=20))
    assert hints[120 * 30 :] == pytest.approx([3.0] * (120 * 30), rel=0.05)
    for _ in range(40):
        pace.request_left(70.0, 20)
    assert pace.retry_seconds(70.0, num_waiting=20) < 0.1, "the overload is over"


def test_callers_who_keep_to_their_hints_are_served_without_a_gap():
    """500 callers at once, room for 20, 10 served a second: the queue never runs dry, and few have to ask twice."""
    pace, queue, num_asked, num_served = Pace(), 20, 0, 0
    for tenth in range(-100, 0):
        pace.request_left(tenth / 10 + 10.0, 20)
    due = [10.0] * 480
    for tenth in range(100, 100 + 500):
        now = tenth / 10
        for _ in range(sum(moment <= now for moment in due)):
            num_asked += 1
            if queue < 20:
                queue += 1
            else:
                due.append(now + pace.retry_seconds(now, queue))
        due = [moment for moment in due if moment > now]
        assert queue, f"nobody is there to be served at {now}"
        queue -= 1
        num_served += 1
        pace.request_left(now, queue)
    assert num_served == 500 and num_asked < 3 * 480, (num_served, num_asked)


def test_the_hint_is_bounded_when_nobody_leaves():
    pace = Pace()
    assert pace.retry_seconds(0.0) == 1.0
    pace.request_left(0.0, 1)
    assert 0.05 <= pace.retry_seconds(1e6) <= 60.0


@pytest.mark.parametrize(("period", "idle_seconds"), [(2.0, 0.0), (0.1, 60.0), (0.1, 0.0)])
def test_the_hint_is_of_what_could_be_served(period: float, idle_seconds: float):
    """Steps take 0.1 s and serve four: 40 leave a second, however few came before a burst in which 148 are refused."""
    scheduler, now, hints = make_scheduler(max_running=4, max_waiting=16, num_pages=64), 0.0, []
    for _ in range(100):
        scheduler.add(make_request(1, max_tokens=1, arrival_seconds=now))
        plan = scheduler.plan(now)
        assert plan is not None
        scheduler.account(plan, [5], now + 0.1)
        now += period
    now += idle_seconds
    for _ in range(5):
        for seed in range(36):
            try:
                scheduler.add(make_request(seed, max_tokens=1, arrival_seconds=now))
            except QueueFullError as error:
                hints.append(error.retry_seconds)
        plan, now = scheduler.plan(now), now + 0.1
        assert plan is not None
        scheduler.account(plan, [5] * plan.num_requests, now)
    assert len(hints) == 148 and 0.05 <= min(hints) and max(hints) < 148 / 40


def test_the_queue_hands_on_the_hint():
    scheduler = make_scheduler(max_waiting=1)
    scheduler.add(make_request(1))
    with pytest.raises(QueueFullError) as caught:
        scheduler.add(make_request(2))
    assert caught.value.retry_seconds == 1.0


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"priority": 101}, "priority: got 101; allowed is -100 to 100"),
        ({"cache_salt": "x" * 257}, "cache_salt: got '257 characters'"),
        ({"n": 0}, "n: got 0; allowed is 1 to 64"),
    ],
)
def test_options_out_of_range_are_refused(fields: dict, fault: str):
    with pytest.raises(InvalidRequestError, match=fault):
        RequestOptions(**fields)


# --- several decode steps in one dispatch


def window_of(*requests: Request, num_pages: int = 32, **changes: float) -> tuple[int, list[int]]:
    """Returns the steps of the first dispatch after the prefill, and those of each request."""
    scheduler = make_scheduler(num_pages, **{"max_decode_steps": 4, **changes})
    for request in requests:
        scheduler.add(request)
    scheduler.plan(0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.audit()
    return plan.num_steps, list(plan.decode_lengths)


def test_decodes_alone_run_several_steps_at_once():
    assert window_of(make_request(1, 3, 9), make_request(2, 3, 9)) == (4, [4, 4])


def test_a_window_ends_with_the_output():
    assert window_of(make_request(1, 3, 9), make_request(2, 3, 3)) == (4, [4, 2])
    assert window_of(make_request(1, 3, 2), make_request(2, 3, 2)) == (1, [])


def test_no_window_while_somebody_waits():
    assert window_of(make_request(1, 3, 9), make_request(2, 3, 9), max_running=1) == (1, [])


def test_no_window_for_more_requests_than_have_several_steps():
    assert window_of(make_request(1, 3, 9), make_request(2, 3, 9), multi_step_requests=1) == (1, [])
    assert window_of(make_request(1, 3, 9), multi_step_requests=1) == (4, [4])


def test_no_window_without_the_pages_for_it():
    assert window_of(make_request(1, 3, 9), num_pages=3) == (4, [4])
    assert window_of(make_request(1, 3, 6), make_request(2, 3, 6), num_pages=3, max_waiting=2)[0] == 1


def test_an_end_inside_a_window_wastes_the_rest_of_it():
    simulation = Simulation(make_limits(max_decode_steps=4, max_context=200, page_size=8), num_pages=200)
    requests = [make_request(seed, max_tokens=100) for seed in range(1, 5)]
    simulation.add(*requests)
    simulation.drain()
    num_stopped = sum(request.finish_reason is FinishReason.STOP for request in requests)
    assert num_stopped and simulation.num_steps < sum(len(request.output_token_ids) for request in requests) / 4
    # What was in flight when the host saw the end: the rest of a window, and the next one.
    assert 0 < simulation.scheduler.num_wasted_tokens <= num_stopped * (2 * 4 - 1)


@pytest.mark.parametrize("arrival", [0.0, math.pi])
def test_one_step_ahead_wastes_at_most_one_token_a_request(arrival: float):
    simulation = Simulation(make_limits(max_running=4, max_waiting=100, max_context=200), num_pages=200)
    simulation.now = arrival
    simulation.add(*(make_request(seed, max_tokens=150) for seed in range(1, 60)))
    simulation.drain()
    num_stopped = sum(request.finish_reason is FinishReason.STOP for request in simulation.accepted)
    assert 0 < simulation.scheduler.num_wasted_tokens <= num_stopped
