"""What a drafter is: it proposes the next tokens of one request, which the next step then verifies.

A drafter has no part in what is sampled. The step samples after each draft token as it would without drafts, and a
draft holds if it is the token sampled before it; a sample depends only on its logits, the request's seed and its
position. So the tokens are those without drafts, greedy or random, whatever a drafter proposes; it decides only how
many come at once.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from .draft_counts import Acceptance


class Drafter(Protocol):
    """Proposes draft tokens for one request."""

    waits_for_tokens: bool  # whether it proposes nothing while tokens of the request are in flight
    acceptance: Acceptance  # its draft tokens' acceptance, updated by `speculation`

    def fork(self) -> Self:
        """Returns an independent copy for the same text."""

    def push(self, token_id: int) -> None:
        """Appends a token that has become known."""

    def guess(self, num_pending: int, num_tokens: int) -> list[int]:
        """Returns at most `num_tokens` draft tokens to follow the `num_pending` tokens that are in flight."""

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Adapts to how many of the last draft tokens were accepted."""


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many draft tokens hold, where `sampled` are the tokens before each of them, and perhaps one more."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return count
