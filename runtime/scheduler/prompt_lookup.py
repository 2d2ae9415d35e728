"""Guesses how a text goes on, from what it said before. Serves step 4 of 10, for `speculation`."""

import copy
from collections.abc import Sequence

_LONGEST_MATCH = 64  # tokens; the most that a text whose guesses fail must match before the next ones


class Drafter:
    """What may follow in one request's text.

    Args:
      token_ids: known so far.
      min_match: tokens that must stand in the text before, in this order, for a guess.
    """

    def __init__(self, token_ids: Sequence[int], min_match: int):
        self._tokens = list(token_ids)
        self._min_match = self._needed = min_match
        # Behind each run of min_match tokens, where it stood last: all but the run that ends the text.
        runs = zip(*(self._tokens[index:-1] for index in range(min_match)), strict=False)
        self._behind_given = dict(zip(runs, range(min_match, len(self._tokens)), strict=False))  # forks share it
        self._behind: dict[tuple[int, ...], int] = {}  # those that came since, which go before
        self._next: int | None = None  # the place in the text that foretells the next token
        self._matched = 0  # tokens before that place that are the last of the text, too
        self._look_up()

    def fork(self) -> "Drafter":
        """Another for the same text."""
        other = copy.copy(self)
        other._tokens, other._behind = list(self._tokens), dict(self._behind)
        return other

    def push(self, token_id: int) -> None:
        """One more token is known."""
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
        """At most `num_tokens` tokens that may follow after `num_pending` that are on their way."""
        if self._next is None or self._matched < self._needed:
            return []
        period = len(self._tokens) - self._next  # behind the end of the text comes what is foretold to stand there
        places = range(num_pending, num_pending + num_tokens)
        return [self._tokens[self._next + place % period] for place in places]

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Takes so many drafts' fate into account."""
        if 2 * num_accepted < num_drafts:
            self._needed = min(2 * self._needed, _LONGEST_MATCH)
        else:
            self._needed = max(self._needed // 2, self._min_match)
