"""How tests wait: for as long as a busy machine may need, and no longer than it takes.

No test compares times. What has to happen is waited for; what must not happen is ruled out by an order of events, or
by an engine or a clock that stands still.
"""

import time
from collections.abc import Callable
from typing import Any

# For a call, an event or the end of a process. It is only ever waited in full when something is broken. A whole test
# may take longer: `timeout` in pyproject.toml.
WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.005


def wait_for(condition: Callable[[], Any], said: Callable[[], Any] = str) -> None:
    """Until the condition is true. `said` makes what a failure tells beside that."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {said()}"
        time.sleep(_POLL_SECONDS)
