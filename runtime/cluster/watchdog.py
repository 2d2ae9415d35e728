"""Fail fast: one thread that looks whether anything is overdue, and ends the process if nothing else does.

Half of the limit is for noticing. Then everybody is told, requests get their statuses, and the rest of the limit ends
in `os._exit`: a collective that waits in C++ for a dead peer cannot be interrupted in any other way.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

FAILED = 1  # exit status
_STARTING_FACTOR = 6  # imports, weights and compilers keep a process busy, and nobody waits for an answer yet

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How long things may take, as shares of the time within which all processes end if one is lost or stuck."""

    fail_seconds: float

    @property
    def beat_seconds(self) -> float:
        """Between two signs of life."""
        return self.fail_seconds / 20

    @property
    def overdue_seconds(self) -> float:
        """Without a sign of life, or for a call under way."""
        return self.fail_seconds / 2

    @property
    def exit_seconds(self) -> float:
        """From noticing to the end of the process."""
        return self.fail_seconds * 0.35


class Watch:
    """Notices a failure, tells of it once, and ends the process.

    Args:
      exit: ends the process at once.
      clock: seconds that never go back.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        exit: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits = limits
        self.failure: str | None = None
        self.is_ready = False
        self._exit = exit
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self._looks: list[Callable[[float], str | None]] = []
        self._is_over = threading.Event()
        self._is_due = threading.Event()  # to look before the next beat
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def overdue_seconds(self) -> float:
        """As the limits say; more of it until `ready`."""
        return self.limits.overdue_seconds * (1 if self.is_ready else _STARTING_FACTOR)

    def start(self) -> None:
        self._thread.start()

    def ready(self) -> None:
        """The processes serve: from now on the limits hold, and who looks is called at once."""
        self.is_ready = True
        self._is_due.set()

    def stop(self) -> None:
        """From now on nothing is a failure. The end of the process, should it be due, still comes."""
        self._is_over.set()
        self._is_due.set()

    def look(self, look: Callable[[float], str | None]) -> None:
        """Calls `look` with the time at every beat; what it returns, if anything, is the reason of a failure."""
        self._looks.append(look)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the reason once something has failed, at once if that is so already. It must not
        block; it may be called from any thread."""
        with self._lock:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def fail(self, reason: str) -> None:
        """The first reason counts; later ones are consequences."""
        with self._lock:
            if self.failure is not None or self._is_over.is_set():
                return
            self.failure = reason
            listeners = tuple(self._listeners)
        end = threading.Timer(self.limits.exit_seconds, self._exit, (FAILED,))
        end.daemon = True
        end.start()
        _log.error("the lockstep failed: %s", reason)
        for listener in listeners:
            listener(reason)

    def _run(self) -> None:
        while True:
            self._is_due.wait(self.limits.beat_seconds)
            self._is_due.clear()
            if self._is_over.is_set():
                return
            now = self._clock()
            for look in tuple(self._looks):
                if (reason := look(now)) is not None:
                    self.fail(reason)
