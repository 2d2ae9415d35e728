"""Estimates how long it takes to copy pages from host memory, and to compute them again. Pure Python.

In: the times that copies and steps with prefill took. Out: whether copying a range of tokens is faster. Attention makes
prefill slower the longer the context, so its time per token is kept by the power of two of the position.
"""

import math

_WEIGHT = 0.25  # of the latest copy in the average
_FORGET_PER_STEP = 1.02  # the fastest time per token grows by at most this factor per slower step
_FORGET_PER_DECISION = 0.99  # the copy's time shrinks by it when it decides against copying, so that it is tried again


class Rates:
    """The measured rates of one server. All times are in seconds."""

    def __init__(self) -> None:
        self._seconds_per_byte = 0.0  # 0 while unknown
        self._seconds_per_token: dict[int, float] = {}  # by power of two of the position

    @property
    def copy_bytes_per_second(self) -> float:
        """The rate of copies to the device in the present load; 0 while unknown."""
        return 1.0 / self._seconds_per_byte if self._seconds_per_byte else 0.0

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Records a copy to the device."""
        latest = seconds / num_bytes
        known = self._seconds_per_byte or latest
        self._seconds_per_byte = known + _WEIGHT * (latest - known)

    def prefilled(self, position: int, num_tokens: int, seconds: float) -> None:
        """Records a step that computed `num_tokens` tokens of prompts around `position`."""
        power, latest = position.bit_length(), seconds / num_tokens
        known = self._seconds_per_token.get(power)
        self._seconds_per_token[power] = latest if known is None else min(latest, known * _FORGET_PER_STEP)

    def copy_seconds(self, num_bytes: int) -> float:
        """Returns how long a copy takes; 0 while unknown, so that it is tried."""
        return num_bytes * self._seconds_per_byte

    def prefill_seconds(self, start: int, end: int) -> float:
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

    def is_copy_faster(self, num_bytes: int, start: int, end: int) -> bool:
        """Returns whether copying `num_bytes` takes less time than computing positions start..end-1."""
        is_faster = self.copy_seconds(num_bytes) < self.prefill_seconds(start, end)
        if not is_faster:
            self._seconds_per_byte *= _FORGET_PER_DECISION
        return is_faster
