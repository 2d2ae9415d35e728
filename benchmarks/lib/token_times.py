"""Records the arrival times of a batch's tokens.

Uses only the standard library, because baselines in other interpreters import it.
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The token times of one run of a batch."""

    seconds: float
    num_tokens: int
    first_seconds: list[float]  # from the start of the run, or of the request where requests run one by one
    gap_seconds: list[float]  # between tokens of a request

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class TokenClock:
    """Records the tokens of each request as they arrive."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._firsts: list[float] = []
        self._gaps: list[float] = []
        self._num_tokens = 0

    def add(self, request: int, began: float, now: float, num_tokens: int = 1) -> None:
        """Adds `num_tokens` of a request that arrived at `now`; the request was started at `began`."""
        if not num_tokens:
            return
        self._num_tokens += num_tokens
        if request in self._last:
            self._gaps.append(now - self._last[request])
        else:
            self._firsts.append(now - began)
        self._gaps += [0.0] * (num_tokens - 1)
        self._last[request] = now

    def times(self, seconds: float) -> RunTimes:
        return RunTimes(
            seconds=seconds, num_tokens=self._num_tokens, first_seconds=self._firsts, gap_seconds=self._gaps
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between neighbors, as numpy does; returns NaN for an empty sequence."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
