"""Sums up where the time of an engine goes: steps of decodes, steps with prompts, and the time between steps."""

import time
from collections import Counter
from collections.abc import Callable

from meshserve.runtime.engine.step_record import StepRecord

_KINDS = ("decodes", "decodes while requests wait for copies", "prompts")


class StepSeconds:
    """The time since the last `reset`, by what the engine did in it. A step begins when the one before it has ended.

    Args:
      clock: Returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self._last = self._clock()
        self.idle_seconds = 0.0  # in which no step was in flight
        self.decode_seconds: list[float] = []  # for each step without prompts
        self._totals: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}

    def record(self, record: StepRecord) -> None:
        """Adds a step that has just been collected; a `step_record.Record`."""
        now = self._clock()
        began = max(now - record.step_seconds, self._last)
        self.idle_seconds += began - self._last
        self._last = now
        num_parked = max(record.num_running - record.num_decodes - record.num_prefills, 0)
        if not record.num_prefill_tokens:
            self.decode_seconds.append(now - began)
        kind = _KINDS[2] if record.num_prefill_tokens else _KINDS[bool(num_parked)]
        self._totals[kind].update(
            steps=1,
            microseconds=round(1e6 * (now - began)),
            decodes=record.num_decodes,
            tokens=record.num_prefill_tokens,
            parked=num_parked,
            queued=record.num_waiting,
            preempted=record.num_preempted,
        )

    def __str__(self) -> str:
        lines = []
        for kind, total in self._totals.items():
            num_steps, seconds = max(total["steps"], 1), total["microseconds"] / 1e6
            mean = {name: f"{total[name] / num_steps:.1f}" for name in ("decodes", "tokens", "parked", "queued")}
            lines.append(
                f"{seconds:7.2f} s in {total['steps']} steps of {kind}, {1e3 * seconds / num_steps:.1f} ms each: "
                f"{mean['decodes']} decodes, {mean['tokens']} prompt tokens; "
                f"{mean['parked']} requests without work, {mean['queued']} queued"
            )
        num_preempted = sum(total["preempted"] for total in self._totals.values())
        return "\n".join([*lines, f"{self.idle_seconds:7.2f} s without a step; {num_preempted} preemptions"])
