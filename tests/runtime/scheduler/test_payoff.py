"""Tests when drafts are tried, and when the faster alternative is chosen."""

import pytest

from meshserve.runtime.scheduler.drafts.payoff import Payoff, Payoffs


def run(payoff: Payoff, num_steps: int, *, drafted: float, plain: float, share: float = 1.0) -> int:
    """Plans steps, of which a share is measured, at these tokens per second, and returns how many had drafts."""
    num_drafted = 0
    for step in range(num_steps):
        wants_drafts = payoff.wants_drafts
        payoff.plan(is_drafted=wants_drafts)
        if int(step * share) != int((step + 1) * share):
            (payoff.drafted if wants_drafts else payoff.plain).add(1, 1 / (drafted if wants_drafts else plain))
        num_drafted += wants_drafts
    return num_drafted


def test_drafts_that_pay_are_chosen_after_a_short_trial() -> None:
    payoff = Payoff()
    num_steps = 5000
    assert run(payoff, num_steps, drafted=2.0, plain=1.0) > 0.99 * num_steps


@pytest.mark.parametrize("share", [1.0, 0.3, 0.02, 0.0])
def test_drafts_that_do_not_pay_are_tried_rarely_however_few_steps_can_be_measured(share: float) -> None:
    assert run(Payoff(), 10_000, drafted=0.5, plain=1.0, share=share) < 0.012 * 10_000


def test_steps_in_which_there_is_nothing_to_draft_do_not_end_a_trial() -> None:
    payoff = Payoff()
    for _ in range(100):
        payoff.plan(is_drafted=False)
    assert payoff.wants_drafts


def test_a_change_is_noticed_both_ways() -> None:
    payoff = Payoff()
    run(payoff, 5000, drafted=0.5, plain=1.0)
    assert run(payoff, 10_000, drafted=2.0, plain=1.0) > 0.6 * 10_000
    assert run(payoff, 10_000, drafted=0.5, plain=1.0) < 0.02 * 10_000


def test_steps_of_other_numbers_of_requests_are_judged_apart() -> None:
    payoffs = Payoffs()
    run(payoffs.of(2), 1000, drafted=2.0, plain=1.0)
    run(payoffs.of(64), 1000, drafted=0.5, plain=1.0)
    assert payoffs.of(3).wants_drafts
    assert not payoffs.of(70).wants_drafts
