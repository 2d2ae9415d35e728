"""How fast the engine goes, measured from the moments it reports. Serves step 4 of 10, which has no clock of its own.

In: when steps end and requests leave. Out: a lower bound of a step's time, and hints to callers who were refused.
"""

import math

_WINDOW_SECONDS = 10.0  # of a queue; what happened this long ago counts a third
_FORGET_PER_STEP = 1.01  # the fastest step seen is believed a little less with each step that is slower
_MIN_MEMORY_SECONDS = 1.0  # of refused callers, where the queue is served faster than that
_UNKNOWN_RETRY_SECONDS = 1.0  # the hint before anything has been measured
_MIN_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0


class Pace:
    """Times are seconds of any clock that never goes back; every call hands in its own."""

    def __init__(self) -> None:
        self._last = 0.0  # the last that happened to the queue
        self._queued_seconds = 0.0  # in which somebody waited
        self._num_left = 0.0  # requests, meanwhile; those of long ago fading
        self._last_step: float | None = None
        self._num_refused = 0.0  # callers, those refused long ago fading
        self._last_refused = 0.0
        self.step_seconds = 0.0  # no step is expected to take less; 0 while unknown

    def step_ended(self, now: float, num_steps: int) -> None:
        """A dispatch of `num_steps` decode steps, or of one step of any kind, was collected."""
        if self._last_step is not None:
            seconds = (now - self._last_step) / num_steps
            slowest = self.step_seconds * _FORGET_PER_STEP if self.step_seconds else math.inf
            self.step_seconds = min(seconds, slowest)
        self._last_step = now

    def rest(self) -> None:
        """No step is in flight: the time until the next one ends is not its own alone."""
        self._last_step = None

    def queue_began(self, now: float) -> None:
        """Nobody waited until now."""
        self._last = now

    def request_left(self, now: float, num_waiting: int) -> None:
        """A request ended, whatever the reason: there is room for another. Where nobody waits, as many leave as come,
        which says nothing of how many could."""
        if num_waiting:
            self._wait(now)
            self._num_left += 1.0
        else:
            self._last = now

    def requests_per_second(self, now: float) -> float:
        """The rate at which requests leave where some wait, as they do now; 0 while unknown."""
        self._wait(now)
        if not self._queued_seconds:
            return 0.0
        weight = _WINDOW_SECONDS * (1.0 - math.exp(-self._queued_seconds / _WINDOW_SECONDS))
        return self._num_left / weight

    def retry_seconds(self, now: float, num_waiting: int = 0) -> float:
        """In how many seconds a caller refused at `now` should try again.

        As long as serving those takes who were refused before it: callers refused together are given moments one after
        the other, no faster than there will be room for them. Who was refused longer ago than the `num_waiting` in
        the queue take to be served has come back by now or never will, and counts less and less. Under a lasting
        overload, which no hint can end, this settles at that time multiplied by refusals over requests served.
        """
        rate = self.requests_per_second(now)
        if rate <= 0.0:
            return _UNKNOWN_RETRY_SECONDS
        memory_seconds = max(num_waiting / rate, _MIN_MEMORY_SECONDS)
        self._num_refused = 1.0 + self._num_refused * math.exp((self._last_refused - now) / memory_seconds)
        self._last_refused = now
        return min(max(self._num_refused / rate, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    def _wait(self, now: float) -> None:
        """Somebody has waited since the last that happened."""
        seconds = max(now - self._last, 0.0)
        self._num_left *= math.exp(-seconds / _WINDOW_SECONDS)
        self._queued_seconds += seconds
        self._last = now
