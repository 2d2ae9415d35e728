"""Where the time of a start goes: its phases one after another, and what jax and the kernels report within them.

A server logs its timeline once, when it is ready, as a line of JSON after `TIMELINE_IN_LOG`; `meshserve bench start`
reads it. Does not import jax.
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMELINE_IN_LOG = "seconds of the start: "
IMPORTS = "imports"

# Events of jax and of ours whose durations are added up, and what they are called. Several threads may report at the
# same time, and a program that calls another is traced with it, so the sums may exceed the phase.
_KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "XLA",
    "/jax/compilation_cache/cache_retrieval_time_sec": "reading jax's cache",
    "/meshserve/programs/load_duration": "loading programs",
    "/meshserve/programs/store_duration": "storing programs",
    "/meshserve/kernels/compile_duration": "nvcc",
    "/meshserve/start/allocation_duration": "allocation",
    "/meshserve/start/warm_up_duration": "warm-up",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartTimeline:
    """The seconds of a start.

    Attributes:
      total: From the begin of the process until it was ready.
      phases: Seconds of each phase, in order; their sum is `total`.
      within: Seconds of what happened within the phases, summed over threads.
    """

    total: float
    phases: dict[str, float]
    within: dict[str, float]

    def __str__(self) -> str:
        return TIMELINE_IN_LOG + json.dumps(dataclasses.asdict(self))


def read_timeline(log: str) -> StartTimeline:
    """Returns the timeline in the text of a server's log.

    Raises:
      ValueError: There is none, so the server was not ready.
    """
    lines = [line for line in log.splitlines() if TIMELINE_IN_LOG in line]
    if not lines:
        raise ValueError(f"the log has no line with {TIMELINE_IN_LOG!r}; use a text log of a server that became ready.")
    return StartTimeline(**json.loads(lines[-1].partition(TIMELINE_IN_LOG)[2]))


class StartClock:
    """Measures the phases of one start. Thread-safe.

    Args:
      began: When the start began, on the monotonic clock.
      phase: The name of the first phase.
    """

    def __init__(self, began: float, phase: str = IMPORTS):
        self._lock = threading.Lock()
        self._began = self._phase_began = began
        self._phase: str | None = phase
        self._phases: dict[str, float] = {}
        self._within: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Ends the current phase and begins another, which may have the name of an earlier one."""
        with self._lock:
            self._end()
            self._phase = phase

    def add(self, event: str, duration_secs: float, **_: Any) -> None:
        """Adds a duration that jax or a kernel reports; a listener of `jax.monitoring`."""
        if (kind := _KINDS.get(event)) is not None:
            with self._lock:
                self._within[kind] = self._within.get(kind, 0.0) + duration_secs

    def end(self) -> StartTimeline:
        """Ends the last phase and returns the timeline, in milliseconds' precision."""
        with self._lock:
            self._end()
            self._phase = None
            within = dict(self._within)
            if "XLA" in within:  # jax counts the reading of its cache as compiling
                within["XLA"] = max(within["XLA"] - within.get("reading jax's cache", 0.0), 0.0)
            return StartTimeline(
                total=round(self._phase_began - self._began, 3),
                phases={name: round(seconds, 3) for name, seconds in self._phases.items()},
                within={name: round(seconds, 3) for name, seconds in within.items()},
            )

    def _end(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._phase_began
        self._phase_began = now


@contextlib.contextmanager
def listening(clock: StartClock) -> Iterator[None]:
    """Adds to a clock what jax and the kernels report within the context."""
    import jax.monitoring  # not at module level: importing jax takes seconds

    jax.monitoring.register_event_duration_secs_listener(clock.add)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(clock.add)


def process_began() -> float:
    """Returns when this process began, on the monotonic clock; now, where the system does not tell."""
    now = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot
        return min(now, now - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_seconds))
    return now
