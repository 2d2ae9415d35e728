"""Helps tests wait for conditions, as long as a busy machine may need.

No test compares times. Tests wait for what has to happen. They rule out what must not happen by an order of events, or
by stopping an engine or a clock.
"""

import time
from collections.abc import Callable
from typing import Any

# Timeout for a call, an event or the end of a process; only reached when something is broken. A whole test may take
# longer: see `timeout` in pyproject.toml.
WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.005


def wait_for(condition: Callable[[], Any], said: Callable[[], Any] = str) -> None:
    """Waits until the condition is true; `said` returns text that is added to a failure."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"timed out waiting: {said()}"
        time.sleep(_POLL_SECONDS)
