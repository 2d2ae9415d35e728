"""Drafters whose draft tokens are accepted as often as they are told to be, whatever is sampled."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Self

from meshserve.runtime.api.request import Request
from meshserve.runtime.scheduler.drafts import speculation
from meshserve.runtime.scheduler.drafts.draft_counts import Acceptance
from meshserve.runtime.scheduler.drafts.model_drafter import UNKNOWN_DRAFT

_ANY_TOKEN = 1


def chance_of(acceptance: float, num_drafts: int) -> float:
    """Returns the chance of each draft token with which a step brings `acceptance` tokens of a request on average.

    Raises:
      ValueError: `num_drafts` draft tokens cannot bring this number of tokens.
    """
    if not 1.0 <= acceptance <= 1.0 + num_drafts:
        raise ValueError(f"--acceptance {acceptance:g}: allowed is 1 to 1 + draft tokens, {1 + num_drafts}.")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_low = sum(middle**place for place in range(num_drafts + 1)) < acceptance
        low, high = (middle, high) if is_low else (low, middle)
    return high


class Oracle:
    """Decides how many draft tokens hold.

    A drafter that knew the tokens of another run would be right only until a step of another shape breaks a near tie
    differently, which random weights do every few hundred tokens. So the decision takes the place of the comparison
    with what was sampled, and the tokens of such a run mean nothing; its steps and their times are those of a drafter
    that is right so often.

    Args:
      num_drafts: The most draft tokens of a request in a step.
      acceptance: The mean number of tokens of a request in a step with `num_drafts`.
      has_draft_model: Whether a draft model proposes them, whose time then counts.

    Raises:
      ValueError: `num_drafts` draft tokens cannot bring `acceptance` tokens.
    """

    def __init__(self, num_drafts: int, acceptance: float, *, has_draft_model: bool = False):
        self._num_drafts, self._chance = num_drafts, chance_of(acceptance, num_drafts)
        self._draft = UNKNOWN_DRAFT if has_draft_model else _ANY_TOKEN
        self._draw = random.Random(0)

    def drafter(self, request: Request) -> "OracleDrafter":
        """Returns the drafter of a request."""
        return OracleDrafter(self._num_drafts, self._draft)

    def count_accepted(self, drafts: Sequence[int], sampled: Sequence[int]) -> int:
        """Replaces `drafter.count_accepted`."""
        count = 0
        while count < len(drafts) and self._draw.random() < self._chance:
            count += 1
        return count

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Lets it decide."""
        compared = speculation.count_accepted
        speculation.count_accepted = self.count_accepted
        try:
            yield
        finally:
            speculation.count_accepted = compared


class OracleDrafter:
    """Implements `drafter.Drafter`. Like a draft model, it needs the request's last token."""

    waits_for_tokens = True

    def __init__(self, num_drafts: int, draft: int):
        self.acceptance = Acceptance()
        self._num_drafts, self._draft = num_drafts, draft

    def fork(self) -> Self:
        raise AssertionError("the benchmark has one sample of each request")

    def push(self, token_id: int) -> None:
        """Does nothing."""

    def guess(self, num_pending: int, num_tokens: int) -> list[int]:
        return [] if num_pending else [self._draft] * min(num_tokens, self._num_drafts)

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Does nothing; its chance is given."""
