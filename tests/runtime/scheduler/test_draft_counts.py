"""How many draft tokens each request gets."""

import pytest

from meshserve.runtime.scheduler.drafts.draft_counts import Acceptance, StepCosts, draft_counts

SIZES = (1, 2, 4, 8, 16, 32)


def costs_of(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts(SIZES)
    for size, its_seconds in seconds.items():
        costs.add(size, its_seconds)
    return costs


def acceptance_of(*outcomes: tuple[int, int]) -> Acceptance:
    acceptance = Acceptance()
    for num_drafts, num_accepted in outcomes:
        acceptance.add(num_drafts, num_accepted)
    return acceptance


FLAT = dict.fromkeys(SIZES, 1.0)
STEEP = {size: float(size) for size in SIZES}


@pytest.mark.parametrize(
    ("seconds", "shares", "lengths", "room", "counts"),
    [
        (FLAT, [0.9], [7], 31, [7]),  # more tokens take no more time
        (FLAT, [0.9], [7], 3, [3]),
        (STEEP, [0.9], [7], 31, [1]),  # a token costs as much as it brings, until one is likely to be rejected
        ({**FLAT, 8: 1.5, 16: 9.0}, [0.9, 0.9], [7, 7], 30, [3, 3]),  # 14 drafts would need a slow size
        ({**FLAT, 8: 1.5, 16: 9.0}, [0.9, 0.65], [7, 7], 30, [5, 1]),  # the more likely ones get more of them
        (FLAT, [0.9, 0.5, 0.9], [0, 2, 1], 29, [0, 2, 1]),  # as many as are proposed
        (FLAT, [0.9, 0.9], [0, 0], 30, [0, 0]),
    ],
)
def test_a_step_gets_the_drafts_that_promise_most(seconds, shares, lengths, room, counts):
    found = draft_counts(shares, lengths, costs_of(seconds), num_tokens=len(shares), room=room)
    assert found == counts


def test_sizes_that_were_not_measured_are_tried():
    costs, tried = StepCosts(SIZES), []
    for _ in range(40):
        [count] = draft_counts([0.95], [31], costs, num_tokens=1, room=31)
        tried.append(costs.size_of(1 + count))
        costs.add(1 + count, 1.0 if count < 8 else 5.0)
    assert set(tried) == set(SIZES[1:]) and set(tried[10:]) == {8}


def test_a_size_that_was_slow_once_is_tried_again():
    costs = costs_of({**FLAT, 32: 30.0})
    tried = []
    for _ in range(4000):
        [count] = draft_counts([0.95], [31], costs, num_tokens=1, room=31)
        tried.append(costs.size_of(1 + count))
        costs.add(1 + count, 1.0)
    assert not {32} & set(tried[:1000]) and tried[-1000:].count(32) > 900


def test_the_share_follows_what_was_accepted_lately():
    assert acceptance_of().share == pytest.approx(0.75)
    assert acceptance_of(*[(4, 4)] * 30).share > 0.95
    assert acceptance_of(*[(4, 0)] * 30).share < 0.05
    assert acceptance_of(*[(4, 1)] * 50).share == pytest.approx(0.5, abs=0.02)  # one held, the next did not
    assert acceptance_of(*[(4, 4)] * 30, *[(4, 0)] * 30).share < 0.3


def test_the_first_three_steps_of_each_shape_are_known():
    costs = StepCosts((4, 8))
    shapes = [(3, 1, True), (4, 1, True), (5, 1, True), (2, 1, True), (1, 1, True), (2, 1, False), (2, 4, False)]
    assert [costs.is_early(*shape) for shape in shapes] == [True, True, True, True, False, True, True]
