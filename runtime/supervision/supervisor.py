"""Runs the background tasks of a process in threads: logs their failures, counts them, and runs the tasks again.

An exception ends a thread, and Python only prints it. A server whose tokens are no longer reloaded, or whose watchdog
is gone, then looks healthy. Hence no other module of the server starts a thread (`tests/runtime/supervision` checks
it), apart from pools whose calls somebody waits for.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.5, 30.0  # before a failed task runs again, doubled each time
_STABLE_SECONDS = 60.0  # a run that has lasted for so long ends a series of failures
_MAX_FAILURES = 3  # in a series, after which the task is a reason not to be ready
_STUCK_SECONDS = 30.0  # a call of a periodic task that takes longer is one as well

_log = logging.getLogger(__name__)


class BackgroundTask:
    """A task in a thread of its own. Its attributes may be read from any thread."""

    def __init__(self, name: str, clock: Callable[[], float]):
        self.name = name
        self.num_failures = 0  # in the present series
        self.last_failure = ""
        self.called: float | None = None  # when the present call of a periodic task began; None between two calls
        self.is_periodic = False
        self._clock = clock
        self._began = clock()
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the task has not ended, and will run again if it fails."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Waits until the task has ended."""
        assert self._thread is not None
        self._thread.join(timeout_seconds)

    @property
    def problem(self) -> str:
        """Why the task is a reason not to be ready; empty if it is none."""
        now, called = self._clock(), self.called
        if called is not None and now - called > _STUCK_SECONDS:
            return f"the background task {self.name!r} has not finished for {now - called:.0f} s"
        if self.num_failures >= _MAX_FAILURES and (self.is_periodic or now - self._began < _STABLE_SECONDS):
            return f"the background task {self.name!r} has failed {self.num_failures} times: {self.last_failure}"
        return ""

    def start(self, target: Callable[[], None], *, is_daemon: bool) -> None:
        """Starts the thread. Called by the supervisor."""
        self._thread = threading.Thread(target=target, name=self.name, daemon=is_daemon)
        self._thread.start()

    def begin(self) -> None:
        """Notes that a run begins. Called by the supervisor."""
        self._began = self._clock()

    def fail(self, failure: str) -> None:
        """Notes that a run has failed. Called by the supervisor."""
        self.called = None
        if not self.is_periodic and self._clock() - self._began >= _STABLE_SECONDS:
            self.num_failures = 0
        self.num_failures += 1
        self.last_failure = failure

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next run."""
        return min(_FIRST_PAUSE_SECONDS * 2 ** (self.num_failures - 1), _LAST_PAUSE_SECONDS)


class Supervisor:
    """Starts background tasks and knows how they fare. Its methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.RLock()  # reentrant, because handlers of signals start tasks
        self._tasks: list[BackgroundTask] = []  # that have not ended
        self._num_failures: dict[str, int] = {}  # by the name of the task
        self._is_stopping = threading.Event()

    def once(
        self,
        name: str,
        run: Callable[[], object],
        *,
        on_failure: Callable[[str], None] | None = None,
        is_daemon: bool = True,
    ) -> BackgroundTask:
        """Runs a task that cannot be run again.

        Args:
          name: What the task is, for the log and as a label of a metric.
          run: The task.
          on_failure: Receives the failure. None: it costs only what the task leaves undone.
          is_daemon: Whether the process may end before the task.
        """
        task = BackgroundTask(name, self._clock)

        def run_once() -> None:
            if (failure := self._failure_of(task, run)) and on_failure is not None:
                on_failure(failure)

        return self._started(task, run_once, is_daemon=is_daemon)

    def forever(self, name: str, run: Callable[[], None], is_stopping: threading.Event) -> BackgroundTask:
        """Runs a task until it returns or `is_stopping` is set. If it fails, it is run again after a pause."""
        task = BackgroundTask(name, self._clock)
        return self._started(task, lambda: self._repeat(task, run, is_stopping))

    def every(self, seconds: float, name: str, action: Callable[[], None]) -> BackgroundTask:
        """Calls `action` in this interval until `stop`. If it fails, it is called again, after a pause at first."""
        task = BackgroundTask(name, self._clock)
        task.is_periodic = True

        def run() -> None:
            while not self._is_stopping.wait(seconds):
                task.called = self._clock()
                action()
                task.called, task.num_failures = None, 0

        return self._started(task, lambda: self._repeat(task, run, self._is_stopping))

    def stop(self) -> None:
        """Ends the periodic tasks after their present call, which is not waited for."""
        self._is_stopping.set()

    @property
    def tasks(self) -> list[BackgroundTask]:
        """The tasks that have not ended."""
        with self._lock:
            return list(self._tasks)

    @property
    def problem(self) -> str:
        """Why the process should not be ready: a task that fails again and again, or hangs. Empty if none does."""
        return next((problem for task in self.tasks if (problem := task.problem)), "")

    def num_failures(self) -> Mapping[str, int]:
        """Returns how often each task has failed, by name, for metrics."""
        with self._lock:
            return dict(self._num_failures)

    def _started(self, task: BackgroundTask, run: Callable[[], None], *, is_daemon: bool = True) -> BackgroundTask:
        def run_and_forget() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._tasks.remove(task)

        with self._lock:
            self._num_failures.setdefault(task.name, 0)
            self._tasks.append(task)
        try:
            task.start(run_and_forget, is_daemon=is_daemon)
        except BaseException:  # the system allows no more threads
            with self._lock:
                self._tasks.remove(task)
            raise
        return task

    def _repeat(self, task: BackgroundTask, run: Callable[[], None], is_stopping: threading.Event) -> None:
        while self._failure_of(task, run) and not is_stopping.wait(task.pause_seconds):
            pass

    def _failure_of(self, task: BackgroundTask, run: Callable[[], object]) -> str:
        """Runs a task. Returns how it has failed; empty if it has ended by itself."""
        task.begin()
        try:
            run()
        except BaseException as error:  # a panic in a native library is no Exception
            _log.exception("the background task %r has failed", task.name)
            failure = f"{type(error).__name__}: {error}"
            task.fail(failure)
            with self._lock:
                self._num_failures[task.name] += 1  # last, so that whoever sees the count finds the line in the log
            return failure
        return ""
