"""Tests which tokens of pages a draft model has computed, as steps that it follows or not compute and share them."""

import dataclasses
import random

from meshserve.runtime.scheduler.drafts.coverage import DraftCoverage, in_steps

PAGE_SIZE = 4


@dataclasses.dataclass(eq=False)
class Text:
    """Stands for a request."""

    pages: list[int]


def test_what_is_not_followed_is_missed_from_its_first_token_on():
    coverage, text = DraftCoverage(8, PAGE_SIZE), Text([5, 2, 7])
    coverage.note(text.pages, 0, 6, is_followed=True)
    assert coverage.missed([(text, 6)]) == []
    coverage.note(text.pages, 6, 1, is_followed=False)
    coverage.note(text.pages, 7, 2, is_followed=True)  # behind what is missing
    assert coverage.missed([(text, 6), (text, 9)]) == [(text, 6, 3)]
    coverage.note(text.pages, 6, 3, is_followed=True)
    assert coverage.missed([(text, 9)]) == []


def test_rejected_drafts_and_pages_of_others_are_not_covered():
    coverage, text, other = DraftCoverage(8, PAGE_SIZE), Text([1, 3]), Text([1, 4])
    coverage.note(text.pages, 0, 7, is_followed=True)
    coverage.note(text.pages, 5, 1, is_followed=False)  # the tokens from 5 on were rejected
    assert coverage.missed([(text, 6)]) == [(text, 5, 1)]
    assert coverage.missed([(other, 4)]) == []  # shares the first page
    assert coverage.missed([(other, 5)]) == [(other, 4, 1)]
    again = Text([3])  # a page that is used again
    coverage.note(again.pages, 0, 2, is_followed=False)
    assert coverage.missed([(again, 2)]) == [(again, 0, 2)]


def test_random_steps_leave_nothing_out():
    """Against the set of the positions whose tokens the draft model has."""
    draw = random.Random(3)
    coverage, text = DraftCoverage(10, PAGE_SIZE), Text(draw.sample(range(10), 10))
    known: set[int] = set()
    end = 0
    for _ in range(400):
        start = max(0, end - draw.randrange(3))
        num_tokens, is_followed = draw.randrange(1, 4), draw.random() < 0.6
        if start + num_tokens > 40:
            end, known = 0, set()
            continue
        coverage.note(text.pages, start, num_tokens, is_followed=is_followed)
        end = start + num_tokens
        known = {position for position in known if position < start} | (
            set(range(start, end)) if is_followed else set()
        )
        missed = coverage.missed([(text, end)])
        first_missing = min(set(range(end)) - known, default=end)
        if missed:
            ((_, first, count),) = missed
            assert first <= first_missing and first + count == end
            if draw.random() < 0.1:
                coverage.note(text.pages, first, count, is_followed=True)
                known |= set(range(first, end))
        else:
            assert first_missing == end


def test_steps_hold_what_they_may():
    one, other = Text([0]), Text([1])
    missed = [(one, 2, 9), (other, 0, 3), (one, 0, 1)]
    steps = list(in_steps(missed, max_tokens=5, max_requests=2))
    assert steps == [[(one, 2, 5)], [(one, 7, 4), (other, 0, 1)], [(other, 1, 2), (one, 0, 1)]]
