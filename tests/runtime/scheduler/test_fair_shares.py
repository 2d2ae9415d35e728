"""What tenants may do to each other: order of admission, preemption, prefill and the queue."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshserve.runtime.api.errors import QueueFullError
from meshserve.runtime.api.request import Request
from meshserve.runtime.scheduler.step_plan import StepPlan
from tests.runtime.simulation import Simulation, make_limits, make_request

SEEDS = itertools.count(1)


def request_of(tenant: str, num_prompt_tokens: int = 3, max_tokens: int = 20, **fields) -> Request:
    seed = next(SEEDS)
    return make_request(seed, num_prompt_tokens, max_tokens, ignore_eos=True, tenant=tenant, **fields)


def simulate(num_pages: int = 1000, **limits: float) -> Simulation:
    values = dict(page_size=4, max_running=8, max_step_tokens=64, max_waiting=1000, max_context=64)
    return Simulation(make_limits(**(values | limits)), num_pages)


def running(simulation: Simulation) -> Counter[str]:
    return Counter(request.tenant for request in simulation.scheduler.requests if request.slot is not None)


def tokens_of(plan: StepPlan) -> Counter[str]:
    """Returns the prefill tokens of each tenant in a plan."""
    tokens: Counter[str] = Counter()
    for chunk in plan.prefills:
        tokens[chunk.request.tenant] += chunk.num_tokens
    return tokens


# --- slots


def test_a_flood_at_top_priority_neither_stalls_nor_keeps_out_another_tenant():
    """The polite tenant's stream gets a token in every step, and its later requests get slots up to its share."""
    simulation = simulate()
    polite = request_of("polite", max_tokens=50)
    simulation.add(polite)
    simulation.step()
    for _ in range(100):
        simulation.add(request_of("flood", priority=100, max_tokens=50))
    for step in range(40):
        if step == 10:
            others = [request_of("polite", max_tokens=30) for _ in range(6)]
            simulation.add(*others)
        plan = simulation.dispatch()
        assert plan is not None and polite in plan.requests
        simulation.collect()
    assert running(simulation) == {"polite": 4, "flood": 4}
    assert polite.num_preemptions == 0 and all(each.num_preemptions == 0 for each in others)
    simulation.drain()


def test_slots_follow_the_weights():
    simulation = simulate()
    for _ in range(30):
        simulation.add(request_of("heavy", weight=3.0), request_of("light"))
    for _ in range(10):
        simulation.step()
        assert running(simulation) == {"heavy": 6, "light": 2}
    simulation.drain()


def test_a_tenant_alone_may_use_everything():
    simulation = simulate()
    simulation.add(*(request_of("one") for _ in range(20)))
    simulation.step()
    assert running(simulation) == {"one": 8}


def test_more_tenants_than_slots_take_turns():
    simulation = simulate(max_running=2)
    tenants = [f"t{index}" for index in range(6)]
    for tenant in tenants:
        simulation.add(*(request_of(tenant, max_tokens=4) for _ in range(5)))
    ended: list[str] = []
    while simulation.scheduler.has_work:
        before = set(simulation.scheduler.requests)
        simulation.step()
        ended += [request.tenant for request in before - set(simulation.scheduler.requests)]
        counts = Counter(ended)
        assert max((counts[tenant] for tenant in tenants), default=0) - min(counts[tenant] for tenant in tenants) <= 2
    assert simulation.scheduler.num_preemptions == 0


def test_a_newcomer_gets_a_slot_at_once_and_no_more_than_its_share():
    simulation = simulate(max_running=4)
    simulation.add(*(request_of("first", max_tokens=50) for _ in range(9)))
    for _ in range(3):
        simulation.step()
    simulation.add(*(request_of("second", max_tokens=50) for _ in range(9)))
    for _ in range(10):
        simulation.step()
        assert running(simulation) == {"first": 2, "second": 2}
    assert simulation.scheduler.num_preemptions == 2


# --- pages


def test_pages_beyond_a_share_are_taken_back():
    simulation = simulate(num_pages=36, max_context=128)
    simulation.add(*(request_of("big", 36, 10) for _ in range(4)))  # 9 pages each at first
    for _ in range(4):
        simulation.step()
    assert running(simulation) == {"big": 3}
    simulation.add(*(request_of("small", 8, 10) for _ in range(3)))
    simulation.step()
    simulation.step()
    assert running(simulation)["small"] == 3 and running(simulation)["big"] >= 2
    simulation.drain()


def test_growth_takes_pages_of_a_tenant_beyond_its_share_first():
    """All pages are held. The stream of the tenant within its share goes on; the other tenant gives way."""
    simulation = simulate(num_pages=16, max_running=8, max_context=60)
    polite = request_of("polite", 4, 20)
    simulation.add(polite)
    simulation.step()
    simulation.add(*(request_of("flood", 3, 40, priority=100) for _ in range(8)))
    for _ in range(18):
        plan = simulation.dispatch()
        assert plan is not None and polite in plan.requests
        simulation.collect()
    assert simulation.scheduler.num_preemptions > 0 == polite.num_preemptions
    simulation.drain()


def test_a_request_larger_than_its_share_gives_way_to_earlier_ones_only():
    simulation = simulate(num_pages=16, max_context=64)
    large = request_of("large", 40, 20)
    small = [request_of("small", 8, 12) for _ in range(12)]
    simulation.add(*small[:6])
    simulation.step()
    simulation.add(large)
    for each in small[6:]:
        simulation.step()
        simulation.add(each)
    simulation.drain()
    assert large.num_preemptions <= 6 and all(each.is_finished for each in small)


# --- prefill


def test_prompts_of_two_tenants_are_computed_at_the_rates_of_their_weights():
    simulation = simulate(max_step_tokens=16, max_context=1024)
    simulation.add(*(request_of("flood", 900, 2) for _ in range(4)))
    for _ in range(5):
        simulation.step()
    simulation.add(request_of("polite", 600, 2, weight=3.0))
    tokens: Counter[str] = Counter()
    for _ in range(40):
        plan = simulation.dispatch()
        assert plan is not None
        tokens += tokens_of(plan)
        simulation.collect()
    assert tokens["polite"] == 3 * tokens["flood"] == 480


def test_a_tenant_that_computed_no_prompts_for_long_has_no_credit():
    simulation = simulate(max_step_tokens=16, max_context=1024)
    idle = request_of("idle", 4, 1000)
    simulation.add(idle, *(request_of("busy", 900, 2) for _ in range(4)))
    for _ in range(100):
        simulation.step()
    simulation.add(request_of("idle", 900, 2), request_of("idle", 900, 2))
    tokens: Counter[str] = Counter()
    for _ in range(20):
        plan = simulation.dispatch()
        assert plan is not None
        tokens += tokens_of(plan)
        simulation.collect()
    assert abs(tokens["idle"] - tokens["busy"]) <= 16


# --- the queue


def test_a_queue_full_of_one_tenant_has_room_for_another():
    simulation = simulate(max_running=1, max_waiting=8)
    simulation.add(*(request_of("flood") for _ in range(8)))
    with pytest.raises(QueueFullError):
        simulation.add(request_of("flood"))
    simulation.add(*(request_of("polite") for _ in range(4)))  # half of the queue is its share
    with pytest.raises(QueueFullError):
        simulation.add(request_of("polite"))
    simulation.scheduler.check_room(0.0, 2, "third")
    simulation.drain()


# --- any state


@given(st.integers(0, 2**32), st.integers(12, 60), st.integers(1, 6), st.integers(2, 5))
@settings(max_examples=60)
def test_shares_hold_in_every_step_and_all_end(seed: int, num_pages: int, max_running: int, num_tenants: int):
    """The simulation checks after every step that no tenant within its share gave way, and at the end every output."""
    simulation = simulate(num_pages, max_running=max_running, max_step_tokens=24, max_context=48)
    rng = random.Random(seed)
    weights = {f"t{index}": rng.choice((0.5, 1.0, 4.0)) for index in range(num_tenants)}
    for _ in range(40):
        tenant = rng.choice(list(weights))
        request = request_of(tenant, rng.randint(1, 30), rng.randint(1, 18), priority=rng.choice((-5, 0, 0, 100)))
        request.weight = weights[tenant]
        simulation.add(request)
        while rng.random() < 0.6:
            simulation.step()
    simulation.drain()
