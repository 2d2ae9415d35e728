"""Watchdog of a cluster process: a thread that detects overdue events and then terminates the process.

Half of `fail_seconds` is spent on detection. After that, the other processes are notified, open requests get their
statuses, and the process exits with `os._exit` before the limit ends. Nothing else can interrupt a collective that
waits in C++ for a dead process.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..supervision.supervisor import Supervisor

FAILED = 1  # exit status
_STARTING_FACTOR = 6  # limits are longer during startup: imports, loading and compiling block a process

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Time limits, as shares of the time within which all processes exit after one is lost or stuck."""

    fail_seconds: float

    @property
    def beat_seconds(self) -> float:
        """Interval between two heartbeats."""
        return self.fail_seconds / 20

    @property
    def overdue_seconds(self) -> float:
        """Maximum time without a heartbeat, and maximum duration of a call."""
        return self.fail_seconds / 2

    @property
    def exit_seconds(self) -> float:
        """Time from detecting a failure to the exit of the process."""
        return self.fail_seconds * 0.35


class Watch:
    """Detects failures, reports the first one to its listeners, and terminates the process.

    Args:
      supervisor: Of the background tasks of this process.
      exit: Terminates the process immediately.
      clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        limits: Limits,
        supervisor: Supervisor | None = None,
        *,
        exit: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits = limits
        self.supervisor = supervisor if supervisor is not None else Supervisor()
        self.failure: str | None = None
        self.is_ready = False
        self._exit = exit
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str], None]] = []
        self._looks: list[Callable[[float], str | None]] = []
        self._is_over = threading.Event()
        self._is_due = threading.Event()  # wakes the thread before the next beat

    @property
    def overdue_seconds(self) -> float:
        """`Limits.overdue_seconds`, extended until `ready` is called."""
        return self.limits.overdue_seconds * (1 if self.is_ready else _STARTING_FACTOR)

    def start(self) -> None:
        self.supervisor.forever("watch", self._run, self._is_over)

    def ready(self) -> None:
        """Ends the startup phase: the normal limits apply from now on, and the checks run at once."""
        self.is_ready = True
        self._is_due.set()

    def stop(self) -> None:
        """Ignores failures from now on. An exit that is already scheduled still happens."""
        self._is_over.set()
        self._is_due.set()

    def look(self, look: Callable[[float], str | None]) -> None:
        """Registers a check that is called with the current time at every beat.

        If the check returns a reason, that is a failure.
        """
        self._looks.append(look)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Registers a listener that is called once with the reason of a failure.

        If a failure has already happened, it is called immediately. It must not block, and it may be called from any
        thread.
        """
        with self._lock:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def fail(self, reason: str) -> None:
        """Reports a failure. Only the first reason is kept, because later ones are consequences of it."""
        with self._lock:
            if self.failure is not None or self._is_over.is_set():
                return
            self.failure = reason
            listeners = tuple(self._listeners)
        self.supervisor.once("exit", self._exit_soon)
        _log.error("the cluster failed: %s", reason)
        for listener in listeners:
            listener(reason)

    def _exit_soon(self) -> None:
        time.sleep(self.limits.exit_seconds)
        self._exit(FAILED)

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
