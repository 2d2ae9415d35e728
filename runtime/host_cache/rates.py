"""Estimates how long it takes to copy pages from host memory, and whether to compute them again. Pure Python.

In: the times that copies and steps with prefill took. Out: whether copying a range of tokens is faster.
"""

from ..scheduler.prefill_rates import PrefillRates

_WEIGHT = 0.25  # weight of the latest copy in the average
_FORGET_PER_DECISION = 0.99  # the copy's time shrinks by it when it decides against copying, so that it is tried again


class Rates:
    """The measured rates of one server. All times are in seconds."""

    def __init__(self) -> None:
        self._seconds_per_byte = 0.0  # 0 while unknown
        self.prefill = PrefillRates()

    @property
    def copy_bytes_per_second(self) -> float:
        """The rate of copies to the device, without what they wait for steps; 0 while unknown."""
        return 1.0 / self._seconds_per_byte if self._seconds_per_byte else 0.0

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Records a copy to the device that took all of the time: it did not wait for a step, nor end unseen in one."""
        latest = seconds / num_bytes
        known = self._seconds_per_byte or latest
        self._seconds_per_byte = known + _WEIGHT * (latest - known)

    def copy_seconds(self, num_bytes: int) -> float:
        """Returns how long a copy takes; 0 while unknown, so that it is tried."""
        return num_bytes * self._seconds_per_byte

    def is_copy_faster(self, num_bytes: int, start: int, end: int) -> bool:
        """Returns whether copying `num_bytes` takes less time than computing positions start..end-1."""
        is_faster = self.copy_seconds(num_bytes) < self.prefill.seconds(start, end)
        if not is_faster:
            self._seconds_per_byte *= _FORGET_PER_DECISION
        return is_faster
