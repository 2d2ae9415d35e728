"""Proposes draft tokens by prompt lookup in a request's own text. Serves step 4 of 10, for `speculation`."""

import copy
from collections.abc import Sequence
from typing import Self

from .draft_counts import Acceptance

_LONGEST_MATCH = 64  # tokens; the upper bound of the required match length after rejected drafts


class PromptLookup:
    """Proposes the tokens that followed an earlier occurrence of a request's last few tokens in its own text.

    Implements `drafter.Drafter` (Saxena, "Prompt Lookup Decoding", 2023).

    Args:
      token_ids: The tokens known so far.
      min_match: The number of last tokens that must recur earlier in the text, in this order, for a proposal.
    """

    waits_for_tokens = False

    def __init__(self, token_ids: Sequence[int], min_match: int):
        self.acceptance = Acceptance()
        self._tokens = list(token_ids)
        self._min_match = self._needed = min_match
        # Maps each n-gram of min_match tokens to the position after its last occurrence, excluding the end of the text.
        runs = zip(*(self._tokens[index:-1] for index in range(min_match)), strict=False)
        self._behind_given = dict(zip(runs, range(min_match, len(self._tokens)), strict=False))  # shared by forks
        self._behind: dict[tuple[int, ...], int] = {}  # the same for tokens pushed later; takes precedence
        self._next: int | None = None  # position in the text whose token is the next draft token
        self._matched = 0  # number of tokens before that position that equal the last tokens of the text
        self._look_up()

    def fork(self) -> Self:
        """Returns an independent copy for the same text."""
        other = copy.copy(self)
        other._tokens, other._behind = list(self._tokens), dict(self._behind)
        other.acceptance = Acceptance()
        return other

    def push(self, token_id: int) -> None:
        """Appends a token that has become known."""
        tokens = self._tokens
        if self._next is not None and tokens[self._next] == token_id:
            self._next += 1
            self._matched += 1
        else:
            self._next = None
        if len(tokens) >= self._min_match:
            self._behind[tuple(tokens[-self._min_match :])] = len(tokens)
        tokens.append(token_id)
        if self._next is None:
            self._look_up()

    def _look_up(self) -> None:
        run = tuple(self._tokens[-self._min_match :])
        self._next = self._behind.get(run, self._behind_given.get(run))
        self._matched = self._min_match

    def guess(self, num_pending: int, num_tokens: int) -> list[int]:
        """Returns at most `num_tokens` draft tokens to follow the `num_pending` tokens that are in flight."""
        if self._next is None or self._matched < self._needed:
            return []
        period = len(self._tokens) - self._next  # beyond the end of the text, the matched span repeats
        places = range(num_pending, num_pending + num_tokens)
        return [self._tokens[self._next + place % period] for place in places]

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Adapts the required match length to the acceptance of the last draft tokens."""
        if 2 * num_accepted < num_drafts:
            self._needed = min(2 * self._needed, _LONGEST_MATCH)
        else:
            self._needed = max(self._needed // 2, self._min_match)
