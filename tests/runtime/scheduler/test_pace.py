"""Tests the hints when to retry, and the predicted times of prompts."""

import pytest

from meshserve.runtime.scheduler.pace import Pace


def measured_pace() -> Pace:
    """Returns a pace that has seen two prompt steps: 25 us a token around 2,000, 100 us around 65,000."""
    pace = Pace()
    for now, position in ((0.0, 0), (0.1, 2000), (0.5, 65_000)):
        pace.step_ended(now, 1, 4000, position)
    return pace


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1024, 0.0256), (8192, 0.205), (131_072, 12.5)])
def test_before_anybody_leaves_the_hint_is_the_time_of_a_waiting_prompt(num_tokens: int, seconds: float) -> None:
    hint = measured_pace().retry_seconds(1.0, 16, num_tokens)
    assert hint == pytest.approx(max(seconds, 0.05), rel=0.05)


def test_callers_refused_at_once_are_told_to_wait_for_one_more_prompt_each() -> None:
    pace = measured_pace()
    hints = [pace.retry_seconds(1.0, 16, 8000) for _ in range(3)]
    assert hints == pytest.approx([0.2, 0.4, 0.6])


def test_without_a_measured_step_the_hint_is_a_second() -> None:
    assert Pace().retry_seconds(0.0, 16, 131_072) == 1.0


@pytest.mark.parametrize(("num_left_tokens", "seconds"), [(131_072, 1.0), (100, 13.5), (200_000, 1.0)])
def test_once_requests_leave_their_rate_decides_and_how_much_longer_the_waiting_prompts_are(
    num_left_tokens: int, seconds: float
) -> None:
    """One request leaves a second; a waiting prompt takes 12.5 s."""
    pace = measured_pace()
    for second in range(20):
        pace.request_left(float(second), 4, num_left_tokens)
    assert pace.retry_seconds(20.0, 4, 131_072) == pytest.approx(seconds, rel=0.2)
