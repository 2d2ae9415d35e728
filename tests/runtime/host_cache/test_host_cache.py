"""Tests the host tier with the simulated device: what is saved, restored, lost and computed again, and when."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshserve.runtime.api.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.host_cache.commands import Op
from meshserve.runtime.host_cache.host_cache import HostCache
from meshserve.runtime.host_cache.rates import Rates
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.step_plan import StepPlan
from tests.runtime.fake_copies import FakeCopies, make_size
from tests.runtime.simulation import Simulation, make_limits, make_request, tight_limits

PROMPT = tuple(range(1, 26))  # six full pages of 4 tokens, and one more token


def make_simulation(num_pages: int = 16, **changes: float) -> Simulation:
    copies = FakeCopies(make_size(num_blocks=20), max_polls=0)
    return Simulation(make_limits(**changes), num_pages, copies=copies)


def serve(simulation: Simulation, seed: int, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    request = make_request(seed, max_tokens=2, ignore_eos=True, prompt=prompt, **fields)
    simulation.add(request)
    simulation.drain()
    return request


def fill(simulation: Simulation, first_seed: int, num_requests: int = 4) -> None:
    """Serves other prompts, which take all pages of the device."""
    for seed in range(first_seed, first_seed + num_requests):
        draw = random.Random(seed)
        serve(simulation, seed, tuple(draw.randint(1, 39) for _ in range(25)))


def test_a_prefix_that_left_the_device_comes_back():
    simulation = make_simulation()
    serve(simulation, 1)
    fill(simulation, 10)
    assert simulation.host is not None and simulation.allocator.num_evictions > 6
    num_computed = simulation.num_prefill_tokens
    again = serve(simulation, 2)
    assert again.num_cached_tokens == 24 and simulation.num_prefill_tokens == num_computed + 1
    assert simulation.host.counts.num_restored >= 6
    assert simulation.host.counts.num_lost == simulation.host.counts.num_failed == 0


def test_a_salted_prefix_comes_back_only_for_its_salt():
    simulation = make_simulation()
    serve(simulation, 1, cache_salt="a")
    fill(simulation, 10)
    assert serve(simulation, 2).num_cached_tokens == 0
    assert serve(simulation, 3, cache_salt="b").num_cached_tokens == 0
    assert serve(simulation, 4, cache_salt="a").num_cached_tokens == 24


def test_others_run_while_pages_are_on_their_way():
    simulation = make_simulation(num_pages=24)
    serve(simulation, 1)
    fill(simulation, 10)
    copies = simulation.copies
    assert copies is not None
    copies.max_polls = 40
    returning = make_request(2, max_tokens=2, ignore_eos=True, prompt=PROMPT)
    follower = make_request(3, max_tokens=2, ignore_eos=True, prompt=(*PROMPT[:24], 30))
    other = make_request(4, max_tokens=2, prompt=(7, 8, 9))
    simulation.add(returning)
    simulation.add(follower)
    simulation.add(other)
    while not other.is_finished:
        simulation.step()
    assert returning.is_fetching and returning.slot is not None
    assert follower.is_fetching and follower.slot is None  # it awaits the same pages instead of copying them again
    num_fetches = copies.num_commands[Op.FETCH]
    simulation.drain()
    assert returning.num_cached_tokens == follower.num_cached_tokens == 24
    assert copies.num_commands[Op.FETCH] <= num_fetches + 4


@pytest.mark.parametrize("how", ["cancel", "preempt", "flush"])
def test_what_ends_in_mid_copy_loses_no_page(how: str):
    simulation = make_simulation(max_running=2, max_context=64, priority_seconds=100.0)
    serve(simulation, 1)
    fill(simulation, 10)
    assert simulation.copies is not None and simulation.host is not None
    simulation.copies.max_polls = 1000
    returning = make_request(2, max_tokens=2, ignore_eos=True, prompt=PROMPT)
    simulation.add(returning)
    simulation.step()
    assert returning.is_fetching
    if how == "cancel":
        simulation.finish(returning)
    elif how == "preempt":
        large = make_request(3, 50, max_tokens=10, ignore_eos=True, priority=1)  # 15 of 16 pages
        simulation.add(large)
        simulation.step()
        assert returning.num_preemptions == 1
    else:
        simulation.allocator.flush()
        assert simulation.host.num_pages == 0
    assert returning.is_fetching == (how == "flush")
    simulation.copies.max_polls = 0
    simulation.drain()
    simulation.dispatch()  # frees the staging memory, as the engine's next step does
    assert not simulation.copies.fetched


def test_a_failed_copy_is_computed_again():
    simulation = make_simulation()
    serve(simulation, 1)
    fill(simulation, 10)
    assert simulation.copies is not None and simulation.host is not None
    simulation.copies.failing = 1.0
    assert serve(simulation, 2).num_cached_tokens == 0
    assert simulation.host.counts.num_failed > 0 and simulation.host.counts.num_restored == 0


def test_long_prompts_in_turn_lose_no_page():
    """The devices hold three of four prompts, each of which fills as many pages in a step as can be saved in one."""
    copies = FakeCopies(make_size(num_blocks=60, block_pages=1, max_saves=5), max_polls=1)
    simulation = Simulation(make_limits(max_running=2, max_context=64), 40, copies=copies)
    copies.num_saving = lambda: 0
    prompts = [tuple(1 + (7 * seed + index * index) % 39 for index in range(49)) for seed in range(4)]
    for seed in range(4):
        serve(simulation, seed, prompts[seed])
    assert simulation.host is not None
    for seed in range(4, 16):
        assert serve(simulation, seed, prompts[seed % 4]).num_cached_tokens == 48
    assert simulation.host.counts.num_restored > 80 and simulation.host.counts.num_lost == 0


def test_pages_that_cannot_all_be_saved_are_the_last_of_a_prefix():
    copies = FakeCopies(make_size(num_blocks=20, block_pages=1, max_saves=1), max_polls=0)
    copies.num_saving = lambda: 0
    simulation = Simulation(make_limits(max_step_tokens=64, max_running=1, max_context=33), 8, copies=copies)
    serve(simulation, 1)
    serve(simulation, 2, tuple(range(30, 0, -1)))  # takes all pages in one step
    assert simulation.host is not None and simulation.host.counts.num_lost > 0
    assert serve(simulation, 3).num_cached_tokens > 0


def test_pages_that_requests_hold_are_saved_when_no_others_are_left():
    simulation = make_simulation(num_pages=9, max_running=1)
    request = make_request(1, max_tokens=6, ignore_eos=True, prompt=PROMPT)  # needs eight pages
    simulation.add(request)
    while simulation.host is not None and simulation.host.num_pages < 6:
        assert not request.is_finished
        simulation.step()
    simulation.drain()
    assert simulation.copies is not None
    copied = simulation.copies.num_commands[Op.SAVE]
    fill(simulation, 10, 1)
    assert simulation.allocator.num_evictions >= 5 and simulation.host.counts.num_lost == 0
    assert serve(simulation, 2).num_cached_tokens == 24 and copied == 3


def test_a_page_that_is_evicted_and_filled_again_is_not_saved_before_its_step():
    pages, copies = PageAllocator(2), FakeCopies(make_size(block_pages=2, max_saves=4))
    host = HostCache(pages, make_limits(), copies)
    plan = StepPlan(decodes=[], starts=[], prefills=[])
    first, second = pages.allocate(2)
    pages.publish(first, b"first")
    copies.num_saving = lambda: 4  # so that the page is lost when it is evicted
    assert not host.take_commands(0.0, plan)
    pages.free([first])
    assert pages.allocate(1) == [first]
    pages.publish(second, b"second")
    assert not host.take_commands(0.0, plan) and host.counts.num_lost == 1
    copies.num_saving = lambda: 0
    pages.publish(first, b"first")  # this plan's step computes the same prefix in the same page
    assert not host.take_commands(0.0, plan)
    host.audit()
    (command,) = host.take_commands(0.0, plan)
    assert command.tolist()[0] == Op.SAVE and command.tolist()[2:] == [second, first]


@pytest.mark.parametrize(("num_decodes", "most"), [(8, 9), (9, 4)])
def test_pages_are_restored_faster_beside_few_decodes(num_decodes: int, most: int):
    """Two blocks are written between two steps without delaying decodes; there is staging memory for nine."""
    copies = FakeCopies(make_size(num_blocks=80, block_pages=1, page_bytes=48 << 20, max_fetches=9, max_saves=9), 0)
    simulation = Simulation(make_limits(max_running=10, max_waiting=10, max_context=64), 40, copies=copies)
    serve(simulation, 1, tuple(range(1, 39)))
    fill(simulation, 10, 8)
    for seed in range(20, 20 + num_decodes):
        simulation.add(make_request(seed, 1, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        simulation.step()
    copies.max_polls = 10**6
    simulation.add(make_request(2, max_tokens=2, ignore_eos=True, prompt=tuple(range(1, 39))))
    for _ in range(4):
        simulation.step()
    assert len(copies.fetched) == most


def test_few_pages_are_restored_while_the_next_step_waits_for_the_tokens_of_one():
    """As steps with draft tokens do: no plan is made while a step is in flight, and the next one follows it closely."""
    copies = FakeCopies(make_size(num_blocks=80, block_pages=1, page_bytes=48 << 20, max_fetches=9, max_saves=9), 0)
    simulation = Simulation(make_limits(max_running=10, max_waiting=10, max_context=64), 40, copies=copies)
    serve(simulation, 1, tuple(range(1, 39)))
    fill(simulation, 10, 8)
    for seed in range(20, 29):
        simulation.add(make_request(seed, 1, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        simulation.step()
    copies.max_polls = 10**6
    simulation.add(make_request(2, max_tokens=2, ignore_eos=True, prompt=tuple(range(1, 39))))
    simulation.step()
    host = simulation.host
    assert host is not None and simulation.in_flight and len(copies.fetched) == 2
    nums = []
    for is_idle in (False, False, True):
        while is_idle and simulation.in_flight:
            simulation.collect()
        nums.append(sum(command[0] == Op.FETCH for command in host.take_commands(simulation.now, None)))
    assert nums == [2, 0, 9 - 4]


def test_an_idle_engine_is_told_to_go_on_saving():
    copies = FakeCopies(make_size(num_blocks=20, block_pages=1, max_saves=2), max_polls=0)
    copies.num_saving = lambda: 0
    simulation = Simulation(make_limits(max_step_tokens=64, max_running=1), 9, copies=copies)
    serve(simulation, 1)
    host = simulation.host
    assert host is not None and host.is_behind
    while host.is_behind:
        assert simulation.dispatch() is None
    assert host.num_pages >= 6


def test_a_host_without_memory_keeps_what_it_has():
    simulation = make_simulation()
    serve(simulation, 1)
    fill(simulation, 10)
    assert simulation.copies is not None and simulation.host is not None
    num_pages = simulation.host.num_pages
    assert 0 < num_pages < 40
    simulation.copies.max_blocks = len(simulation.copies.blocks)
    fill(simulation, 20, 6)
    num_failed = simulation.host.counts.num_failed
    assert 0 < num_failed < 20
    fill(simulation, 30, 6)
    assert simulation.host.counts.num_failed == num_failed and simulation.host.num_pages == num_pages


@pytest.mark.parametrize("is_copy_slow", [False, True], ids=["copied", "computed"])
def test_a_preempted_request_gets_its_pages_back_by_the_faster_way(is_copy_slow: bool):
    """The newcomer takes all pages in one step; they are saved in the same step before it writes to them."""
    simulation = make_simulation(num_pages=8, max_running=2, max_step_tokens=32, priority_seconds=100.0)
    assert simulation.host is not None
    if is_copy_slow:
        simulation.host.rates = slow_copies()
    low = make_request(1, max_tokens=6, ignore_eos=True, prompt=PROMPT)
    simulation.add(low)
    for _ in range(3):
        simulation.step()
    simulation.add(make_request(2, 29, max_tokens=2, ignore_eos=True, priority=1))
    simulation.drain()
    counts = simulation.host.counts
    assert low.num_preemptions == 1 and low.finish_reason is FinishReason.LENGTH
    assert (counts.num_resumed, counts.num_recomputed) == ((0, 6) if is_copy_slow else (6, 0))
    assert (simulation.num_prefill_tokens >= 25 + 29 + 25) == is_copy_slow


def slow_copies() -> Rates:
    """Returns rates by which computing tokens is much faster than copying their pages."""
    rates = Rates()
    rates.copied(1, 100.0)
    rates.prefill.prefilled(5, 16, 1.0)
    return rates


def test_computing_again_is_chosen_where_it_is_faster():
    simulation = make_simulation()
    serve(simulation, 1)
    fill(simulation, 10)
    assert simulation.host is not None
    simulation.host.rates = slow_copies()
    assert serve(simulation, 2).num_cached_tokens == 0
    assert simulation.host.counts.num_recomputed == 6


def test_copies_that_are_seen_late_do_not_look_slow():
    """Computing the prefix would take half a step, and a copy is seen to have ended after one."""
    simulation = make_simulation()
    assert simulation.host is not None
    rates = simulation.host.rates
    rates.prefill.prefilled(5, 48, 1.0)
    for seed in range(1, 4):
        serve(simulation, seed)
        fill(simulation, 10 * seed)
    assert simulation.host.counts.num_restored >= 12 and simulation.host.counts.num_recomputed == 0
    assert rates.copy_bytes_per_second == 0.0  # unknown


def test_copies_are_timed_while_the_engine_waits_for_nothing_else():
    simulation = make_simulation()
    serve(simulation, 1)
    fill(simulation, 10)
    host, copies = simulation.host, simulation.copies
    assert host is not None and copies is not None
    copies.max_polls = 9
    simulation.add(make_request(2, max_tokens=2, ignore_eos=True, prompt=PROMPT))
    num_waits = 0
    while simulation.dispatch() is None:  # as the engine does
        host.wait()
        num_waits += 1
    assert num_waits > 2 and 0.0 < host.rates.copy_bytes_per_second <= 3 * host.size.block_bytes


def test_rates_depend_on_the_length():
    rates = Rates()
    assert rates.is_copy_faster(1000, 0, 1)  # nothing is known
    rates.copied(1000, 1.0)
    rates.prefill.prefilled(1000, 100, 0.1)
    rates.prefill.prefilled(30_000, 100, 0.4)
    assert rates.prefill.seconds(0, 1000) == pytest.approx(1.0)
    assert rates.prefill.seconds(16_384, 17_384) == pytest.approx(4.0)
    assert not rates.is_copy_faster(2000, 0, 1000) and rates.is_copy_faster(2000, 16_384, 17_384)
    assert rates.prefill.seconds(10, 10) == 0.0
    for _ in range(200):  # the copy is tried again after a while
        rates.is_copy_faster(2000, 0, 1000)
    assert rates.is_copy_faster(2000, 0, 1000)


@settings(max_examples=150)
@given(st.data(), tight_limits())
def test_no_order_of_events_loses_a_page_or_changes_a_token(
    data: st.DataObject, limits_and_pages: tuple[SchedulerLimits, int]
):
    limits, num_pages = limits_and_pages
    size = make_size(data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3)))
    failing = data.draw(st.sampled_from([0.0, 0.3]))
    copies = FakeCopies(size, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 5)), failing)
    simulation = Simulation(limits, num_pages, data.draw(st.integers(0, 2)), copies=copies)
    seed = 0
    for _ in range(data.draw(st.integers(1, 40))):
        event = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "cancel", "flush"]))
        if event == "add":
            seed += 1
            num_tokens = data.draw(st.integers(1, limits.max_context - 1))
            shared = tuple(1 + index % 5 for index in range(num_tokens))
            request = make_request(
                seed,
                max_tokens=data.draw(st.integers(1, 6)),
                prompt=shared if data.draw(st.booleans()) else shared[::-1],
                tenant=data.draw(st.sampled_from("ab")),
            )
            with contextlib.suppress(InvalidRequestError, QueueFullError):
                simulation.add(request)
        elif event == "cancel" and simulation.accepted:
            simulation.finish(data.draw(st.sampled_from(simulation.accepted)))
        elif event == "flush":
            simulation.allocator.flush()
        else:
            simulation.step()
    simulation.drain()
    simulation.dispatch()
    assert not copies.fetched and simulation.host is not None and not simulation.host.is_fetching
