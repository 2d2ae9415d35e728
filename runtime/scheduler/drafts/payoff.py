"""Decides by measured throughput whether steps get draft tokens. Serves step 4 of 10, for `speculation`."""

from collections import defaultdict
from dataclasses import dataclass, field

_TRIAL_STEPS = 32  # steps with drafts in the first trial, of which the early ones of each shape do not count
_PROBE_STEPS = 8  # steps in each later trial of the alternative
_PROBE_EVERY = 512  # steps from a trial to the next; twice as many after each that changes nothing
_MAX_PROBE_EVERY = 1024
_LEAST_STEPS = 8  # measured with drafts, and as many without, before the faster is chosen
_FADE = 0.95  # decay of the measurements per step


@dataclass
class _Rate:
    """Exponentially decayed totals of tokens and seconds over recent steps."""

    num_steps: int = 0
    num_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self.num_tokens = self.num_tokens * _FADE + num_tokens
        self.seconds = self.seconds * _FADE + seconds


@dataclass
class Payoff:
    """Compares the throughput with and without draft tokens, for steps of a similar number of requests.

    Steps with prefill chunks cannot be compared, and under load they may be nearly all. A trial therefore lasts for so
    many steps that drafts affect, whether they can be measured or not.
    """

    # Includes steps that a request sat out because of drafts, and the step after each, whose time they also affect.
    drafted: _Rate = field(default_factory=_Rate)
    plain: _Rate = field(default_factory=_Rate)
    _num_planned: int = 0
    _trial: range = range(_TRIAL_STEPS)  # the steps in which the alternative is measured
    _every: int = _PROBE_EVERY
    _pays: bool = False  # as found by the last trial

    def plan(self, *, is_drafted: bool) -> None:
        """Records a planned step, and whether it has drafts or a request sits it out."""
        if not is_drafted and self.wants_drafts and self._num_planned in self._trial:
            return  # nothing is tried
        self._num_planned += 1
        if self._num_planned == self._trial.stop:
            self._every = min(2 * self._every, _MAX_PROBE_EVERY) if self._pays == self._drafts_pay else _PROBE_EVERY
            self._pays = self._drafts_pay
            start = self._num_planned + self._every
            self._trial = range(start, start + _PROBE_STEPS)

    @property
    def wants_drafts(self) -> bool:
        """Whether a step that is planned now gets the drafts that there are."""
        return self._drafts_pay != (self._num_planned in self._trial)

    @property
    def _drafts_pay(self) -> bool:
        if min(self.drafted.num_steps, self.plain.num_steps) < _LEAST_STEPS:
            return False
        return self.drafted.num_tokens * self.plain.seconds >= self.plain.num_tokens * self.drafted.seconds

    def saved_seconds(self, num_tokens: int, seconds: float) -> float:
        """Returns how much longer a step's tokens would have taken without drafts; 0 if that is not known yet."""
        if self.plain.num_steps < _LEAST_STEPS:
            return 0.0
        return num_tokens * self.plain.seconds / max(self.plain.num_tokens, 1e-9) - seconds


class Payoffs:
    """The payoff of draft tokens for each power of two of decodes."""

    def __init__(self) -> None:
        self._by_power: defaultdict[int, Payoff] = defaultdict(Payoff)
        self._last: float | None = None  # end of the last step; None after idle time
        self._was_drafted = False  # whether that step had drafts, or a request sat it out

    def of(self, num_decodes: int) -> Payoff:
        """Returns the payoff for steps of about `num_decodes` decodes, including those that pause."""
        return self._by_power[num_decodes.bit_length()]

    def rest(self) -> None:
        """Records that there is no work, so that idle time is not measured."""
        self._last = None

    def measure(
        self, num_decodes: int, num_tokens: int | None, *, is_drafted: bool, started: float, now: float
    ) -> float:
        """Records the end of a step, and returns the seconds that it took.

        Args:
          num_decodes: As for `of`.
          num_tokens: The tokens that it brought; None if it is not to be compared, because it had prefill chunks.
          is_drafted: Whether it had drafts, or a request sat it out.
          started: When it was planned, which counts if it followed idle time.
        """
        seconds = now - (started if self._last is None else self._last)
        if num_tokens is not None:
            payoff = self.of(num_decodes)
            rate = payoff.drafted if is_drafted or self._was_drafted else payoff.plain
            rate.add(num_tokens, seconds)
        self._last, self._was_drafted = now, is_drafted
        return seconds
