"""Estimates how long a prompt takes to compute, by its length. Pure Python, without a clock.

In: the times of steps that mostly computed prompts. Out: the seconds for a range of tokens. Attention makes prefill
slower the longer the context, so the time per token is kept by the power of two of the position.
"""

import math

_FORGET_PER_STEP = 1.02  # the fastest time per token grows by at most this factor per slower step


class PrefillRates:
    """The measured rates of prefill of one server. All times are in seconds."""

    def __init__(self) -> None:
        self._seconds_per_token: dict[int, float] = {}  # by power of two of the position

    def prefilled(self, position: int, num_tokens: int, seconds: float) -> None:
        """Records a step that computed `num_tokens` tokens of prompts around `position`."""
        power, latest = position.bit_length(), seconds / num_tokens
        known = self._seconds_per_token.get(power)
        self._seconds_per_token[power] = latest if known is None else min(latest, known * _FORGET_PER_STEP)

    def seconds(self, start: int, end: int) -> float:
        """Returns how long it takes to compute positions start..end-1 at the rate seen lately; infinity if unknown.

        The time per token at positions that were never measured is that of the nearest ones.
        """
        if not self._seconds_per_token:
            return math.inf
        total = 0.0
        while start < end:
            power = start.bit_length()
            stop = min(end, max(1 << power, start + 1))
            nearest = min(self._seconds_per_token, key=lambda known: (abs(known - power), known))
            total += (stop - start) * self._seconds_per_token[nearest]
            start = stop
        return total
