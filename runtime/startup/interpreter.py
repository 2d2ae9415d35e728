"""Sets up the Python interpreter of a process in which an engine runs beside other threads."""

import sys

# How long a thread waits for the interpreter lock before it interrupts another. Devices wait for the engine's thread.
_SWITCH_SECONDS = 0.0005


def take_turns_often() -> None:
    """Lets threads take turns every half millisecond instead of every five. Process-wide.

    Otherwise, a thread that tokenises or submits texts makes the engine's thread wait for several milliseconds each
    time it needs the lock again, several times in a step.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
