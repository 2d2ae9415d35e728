"""Tests that background tasks go on after failures, and that a task which cannot is known."""

import logging
import threading
from collections.abc import Callable

import pytest

from meshserve.runtime.supervision import supervisor as module
from meshserve.runtime.supervision.supervisor import Supervisor
from tests.waiting import WAIT_SECONDS, wait_for


class Panic(BaseException):
    """Like what native libraries raise, which is no Exception."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.001)


def failing(num_failures: int, error: BaseException, then: Callable[[], object]) -> Callable[[], None]:
    """Returns a task that fails so often before it does `then`."""
    errors = [error] * num_failures

    def run() -> None:
        if errors:
            raise errors.pop()
        then()

    return run


@pytest.mark.parametrize("error", [ValueError("odd"), RecursionError(), Panic()])
def test_a_periodic_task_goes_on_after_failures(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    supervisor, has_run = Supervisor(), threading.Event()
    with caplog.at_level(logging.ERROR):
        task = supervisor.every(0.001, "reading", failing(2, error, has_run.set))
        assert has_run.wait(WAIT_SECONDS)
    wait_for(lambda: task.num_failures == 0)
    assert supervisor.num_failures() == {"reading": 2} and supervisor.problem == ""
    supervisor.stop()
    task.join(WAIT_SECONDS)
    assert not task.is_alive and supervisor.tasks == []
    assert caplog.text.count("the background task 'reading' has failed") == 2
    assert caplog.text.count("Traceback") == 2 and type(error).__name__ in caplog.text


def test_a_task_that_runs_for_long_is_run_again_until_it_is_to_stop() -> None:
    supervisor, is_stopping, has_run = Supervisor(), threading.Event(), threading.Event()

    def run() -> None:
        has_run.set()
        assert is_stopping.wait(WAIT_SECONDS)
        raise OSError("closed")

    task = supervisor.forever("publishing", failing(1, KeyError("a"), run), is_stopping)
    assert has_run.wait(WAIT_SECONDS) and task.is_alive
    assert supervisor.num_failures() == {"publishing": 1}
    is_stopping.set()
    task.join(WAIT_SECONDS)
    assert not task.is_alive, "a failure at the end starts nothing again"
    ended = supervisor.forever("publishing", lambda: None, threading.Event())
    ended.join(WAIT_SECONDS)
    assert not ended.is_alive, "a task that returns has ended"


def test_a_task_that_cannot_run_again_tells_why() -> None:
    supervisor, failures = Supervisor(), []
    run = failing(1, ValueError("odd"), lambda: None)
    supervisor.once("loading", run, on_failure=failures.append).join(WAIT_SECONDS)
    supervisor.once("loading", run, on_failure=failures.append).join(WAIT_SECONDS)
    assert failures == ["ValueError: odd"] and supervisor.num_failures() == {"loading": 1}


def test_a_task_that_fails_again_and_again_is_a_reason_not_to_be_ready_until_it_works() -> None:
    supervisor, is_mended, calls = Supervisor(), threading.Event(), []

    def read() -> None:
        calls.append(1)
        if not is_mended.is_set():
            raise ValueError("odd")

    supervisor.every(0.001, "reading", read)
    wait_for(lambda: supervisor.problem)
    assert "the background task 'reading' has failed" in supervisor.problem and "ValueError: odd" in supervisor.problem
    assert len(calls) >= module._MAX_FAILURES
    is_mended.set()
    wait_for(lambda: not supervisor.problem)
    supervisor.stop()


def test_failures_of_a_task_that_has_run_for_long_since_do_not_count() -> None:
    now, is_stopping = 0.0, threading.Event()
    supervisor, runs, may_fail = Supervisor(lambda: now), [], threading.Semaphore(0)

    def run() -> None:
        runs.append(1)
        assert may_fail.acquire(timeout=WAIT_SECONDS)
        if not is_stopping.is_set():
            raise ValueError("odd")

    task = supervisor.forever("publishing", run, is_stopping)
    may_fail.release(module._MAX_FAILURES)
    wait_for(lambda: len(runs) == module._MAX_FAILURES + 1)
    assert supervisor.problem
    now = module._STABLE_SECONDS
    assert not supervisor.problem
    may_fail.release()
    wait_for(lambda: task.num_failures == 1)
    is_stopping.set()
    may_fail.release()
    task.join(WAIT_SECONDS)


def test_a_call_that_hangs_is_a_reason_not_to_be_ready() -> None:
    now, may_go_on, is_called = 0.0, threading.Event(), threading.Event()
    supervisor = Supervisor(lambda: now)

    def hang() -> None:
        is_called.set()
        assert may_go_on.wait(WAIT_SECONDS)

    supervisor.every(0.001, "reading", hang)
    assert is_called.wait(WAIT_SECONDS) and not supervisor.problem
    now = module._STUCK_SECONDS + 1
    assert supervisor.problem == "the background task 'reading' has not finished for 31 s"
    supervisor.stop()
    may_go_on.set()
    wait_for(lambda: not supervisor.problem and not supervisor.tasks)


def test_pauses_grow_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    task = module.BackgroundTask("reading", lambda: 0.0)
    pauses = []
    for _ in range(9):
        task.fail("odd")
        pauses.append(task.pause_seconds)
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0] and pauses[-1] == 30.0
