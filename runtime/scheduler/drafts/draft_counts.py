"""Decides how many draft tokens each request gets in a step. Serves step 4 of 10, for `speculation`.

A draft token counts only if all before it hold, so each further one of a request is worth less: if a share a of them
holds, the n-th brings a^n tokens. Steps are padded to a few sizes, so draft tokens take no time until a step needs the
next size. Both are measured: the share that holds for each request, and the seconds of steps with drafts of each
size. A step gets the size and the draft tokens that promise the most tokens a second.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

_FADE = 0.9  # decay of what is measured, per step
_FORGET = 0.999  # decay of a size's expected seconds, per step without it, so that it is tried again
_FIRST_ACCEPTED, _FIRST_REJECTED = 1.5, 0.5  # what a new request starts with
_NUM_EARLY = 3  # steps of a shape whose times include what a GPU does once or twice for a program


class Acceptance:
    """The share of draft tokens of one request that hold if all before them do."""

    def __init__(self) -> None:
        self._num_accepted, self._num_rejected = _FIRST_ACCEPTED, _FIRST_REJECTED

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Adds the outcome of a step; drafts after the first rejected one tell nothing."""
        self._num_accepted = self._num_accepted * _FADE + num_accepted
        self._num_rejected = self._num_rejected * _FADE + (num_accepted < num_drafts)

    @property
    def share(self) -> float:
        return self._num_accepted / (self._num_accepted + self._num_rejected)


class StepCosts:
    """The seconds of steps with drafts, by size.

    Args:
      sizes: The numbers of tokens to which such steps are padded, ascending.
    """

    def __init__(self, sizes: Sequence[int]):
        self._sizes = tuple(sizes)
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}  # the step that measured each size last
        self._num_steps = 0
        self._met: Counter[tuple[int, int, bool]] = Counter()

    def is_early(self, num_tokens: int, num_steps: int, is_drafted: bool) -> bool:
        """Returns whether a step is one of the first of its shape, with drafts or without, which may be two programs.

        In its first runs, a GPU loads a program's kernels, records its CUDA graphs and moves them to other addresses.
        """
        shape = self.size_of(num_tokens), num_steps, is_drafted
        self._met[shape] += 1
        return self._met[shape] <= _NUM_EARLY

    def size_of(self, num_tokens: int) -> int:
        """Returns the size to which a step is padded."""
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else num_tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds the time that a step with drafts took."""
        size = self.size_of(num_tokens)
        self._num_steps += 1
        kept = _FADE ** (self._num_steps - self._measured_at.get(size, 0))
        self._measured_at[size] = self._num_steps
        self._seconds[size] = seconds + kept * (self._seconds.get(size, seconds) - seconds)

    def seconds(self, size: int) -> float:
        """Returns the expected time of a step: no less than that of any smaller size; 0 if nothing is known."""
        smaller = [(known, seconds) for known, seconds in self._seconds.items() if known <= size]
        expected = [seconds * _FORGET ** (self._num_steps - self._measured_at[known]) for known, seconds in smaller]
        return max(expected, default=0.0)


def draft_counts(
    shares: Sequence[float], lengths: Sequence[int], costs: StepCosts, *, num_tokens: int, room: int
) -> list[int]:
    """Returns how many draft tokens each decode of a step gets.

    Args:
      shares: For each decode, the share of its request's draft tokens that are accepted.
      lengths: For each decode, the number of proposed draft tokens.
      costs: The seconds of steps. A size that has not been measured is taken for as fast as the next smaller one.
      num_tokens: The tokens of the step without drafts.
      room: How many draft tokens the step may have.
    """
    gains, places = [], list(zip(shares, lengths, range(len(shares)), strict=True))
    for place in range(1, max(lengths, default=0) + 1):  # among equal gains, the first places go first
        gains += [(share**place, index) for share, length, index in places if place <= length]
    gains = sorted(gains, key=itemgetter(0), reverse=True)[:room]
    totals = list(itertools.accumulate((gain for gain, _ in gains), initial=float(len(shares))))
    best, best_rate = 0, -1.0
    for size in dict.fromkeys(costs.size_of(num_tokens + count) for count in range(1, len(gains) + 1)):
        count = min(size - num_tokens, len(gains))
        rate = totals[count] / max(costs.seconds(size), 1e-9)
        if rate > best_rate:
            best, best_rate = count, rate
    counts = [0] * len(shares)
    for _, index in gains[:best]:
        counts[index] += 1
    return counts
