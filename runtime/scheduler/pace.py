"""Estimates step time and request throughput from reported timestamps. Serves step 4 of 10, which has no clock itself.

In: the times at which steps end and requests leave. Out: a lower bound on the step time, and retry hints for refused
callers.
"""

import math

from .prefill_rates import PrefillRates

_WINDOW_SECONDS = 10.0  # time constant of the decayed counts
_FORGET_PER_STEP = 1.01  # the minimum step time grows by at most this factor per slower step
_MIN_MEMORY_SECONDS = 1.0  # shortest time constant of the decayed count of refused callers
_UNKNOWN_RETRY_SECONDS = 1.0  # retry hint before anything has been measured
_MIN_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0


class Pace:
    """Tracks step time and throughput. All times are seconds of one monotonic clock, passed in by the caller."""

    def __init__(self) -> None:
        self._last = 0.0  # time of the last queue event
        self._queued_seconds = 0.0  # total time during which the queue was not empty
        self._num_left = 0.0  # decayed count of requests that left during that time
        self._num_left_tokens = 0.0  # in their prompts
        self._last_step: float | None = None
        self._num_refused = 0.0  # decayed count of refused callers
        self._last_refused = 0.0
        self.step_seconds = 0.0  # lower bound on the step time; 0 while unknown
        self.prefill = PrefillRates()

    def step_ended(self, now: float, num_steps: int, num_tokens: int = 0, prefill_position: int | None = None) -> None:
        """Records that a dispatch of `num_steps` decode steps, or of one step of any kind, was collected.

        `prefill_position` is the position around which most of its `num_tokens` tokens were, if they were of prompts.
        """
        if self._last_step is not None:
            seconds = (now - self._last_step) / num_steps
            slowest = self.step_seconds * _FORGET_PER_STEP if self.step_seconds else math.inf
            self.step_seconds = min(seconds, slowest)
            if prefill_position is not None and seconds > 0.0:
                self.prefill.prefilled(prefill_position, num_tokens, seconds)
        self._last_step = now

    def rest(self) -> None:
        """Records that no step is in flight. Idle time before the next step is excluded from the step-time estimate."""
        self._last_step = None

    def queue_began(self, now: float) -> None:
        """Records that the queue was empty until `now`."""
        self._last = now

    def request_left(self, now: float, num_waiting: int, num_prompt_tokens: int = 0) -> None:
        """Records that a request ended, for any reason, and made room for another one.

        Only departures while others wait are counted: with an empty queue the rate of departures equals the rate of
        arrivals and says nothing about capacity.
        """
        if num_waiting:
            self._wait(now)
            self._num_left += 1.0
            self._num_left_tokens += num_prompt_tokens
        else:
            self._last = now

    def requests_per_second(self, now: float) -> float:
        """Returns the rate at which requests leave while others wait; 0 while unknown. Call it while requests wait."""
        self._wait(now)
        if not self._queued_seconds:
            return 0.0
        weight = _WINDOW_SECONDS * (1.0 - math.exp(-self._queued_seconds / _WINDOW_SECONDS))
        return self._num_left / weight

    def retry_seconds(self, now: float, num_waiting: int = 0, mean_prompt_tokens: int = 0) -> float:
        """Returns the number of seconds after which a caller refused at `now` should retry.

        The delay is the time needed to serve the callers refused before it, so callers refused at the same time get
        staggered delays, no faster than room becomes available. Callers refused longer ago than the `num_waiting`
        queued requests take to be served have either retried or given up; their count decays with that time constant.
        Under a lasting overload the delay converges to that time multiplied by the ratio of refused to served requests.

        Requests leave as fast as lately, but if the waiting prompts, of `mean_prompt_tokens` tokens, are longer than
        those of the requests that left, each takes as much longer as computing it does. Before a request has left,
        requests are assumed to leave as fast as waiting prompts are computed, that is, get their first tokens.
        """
        rate = self.requests_per_second(now)
        seconds = self.prefill.seconds(0, mean_prompt_tokens)  # for each request
        seconds = 0.0 if math.isinf(seconds) else seconds
        if rate > 0.0:
            left_seconds = self.prefill.seconds(0, round(self._num_left_tokens / self._num_left))
            seconds = 1.0 / rate + max(seconds - left_seconds, 0.0)
        if seconds <= 0.0:
            return _UNKNOWN_RETRY_SECONDS
        memory_seconds = max(num_waiting * seconds, _MIN_MEMORY_SECONDS)
        self._num_refused = 1.0 + self._num_refused * math.exp((self._last_refused - now) / memory_seconds)
        self._last_refused = now
        return min(max(self._num_refused * seconds, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)

    def _wait(self, now: float) -> None:
        """Adds the time since the last queue event, during which requests waited."""
        seconds = max(now - self._last, 0.0)
        kept = math.exp(-seconds / _WINDOW_SECONDS)
        self._num_left *= kept
        self._num_left_tokens *= kept
        self._queued_seconds += seconds
        self._last = now
