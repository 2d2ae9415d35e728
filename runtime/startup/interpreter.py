"""Sets up the Python interpreter of a process in which an engine runs beside other threads."""

import contextlib
import gc
import sys
from collections.abc import Iterator

# How long a thread waits for the interpreter lock before it interrupts another. Devices wait for the engine's thread.
_SWITCH_SECONDS = 0.0005
_USUAL_THRESHOLDS = gc.get_threshold()
_RARE_THRESHOLDS = (50_000, *_USUAL_THRESHOLDS[1:])


def take_turns_often() -> None:
    """Lets threads take turns every half millisecond instead of every five. Process-wide.

    Otherwise, a thread that tokenises or submits texts makes the engine's thread wait for several milliseconds each
    time it needs the lock again, several times in a step.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Lets the garbage collector wait for 50,000 new objects, until `collect_as_usual` or the end. Process-wide.

    Imports and traced programs leave many objects that stay, and little garbage. With the usual threshold of 700 or
    2,000, a tenth of the processor time of the imports goes into looking at them again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARE_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def collect_as_usual() -> None:
    """Ends what `collecting_rarely` has begun, before its context ends."""
    gc.set_threshold(*_USUAL_THRESHOLDS)
