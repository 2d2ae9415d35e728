"""Tests SIGHUP: one reload at a time, one more in line, and none for a server that takes no requests."""

import logging
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.errors import EngineStoppedError
from meshserve.runtime.cluster.leader import Alone
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.edge import Backend
from meshserve.runtime.startup.reload import reload_on_hangup
from meshserve.runtime.startup.serve import _Serving
from meshserve.runtime.supervision.supervisor import Supervisor
from meshserve.runtime.telemetry.start_timeline import StartClock
from tests.runtime.loopback import INFO, FakeEngine, Letters
from tests.waiting import WAIT_SECONDS, wait_for


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Restores the handler of SIGHUP."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def hang_up(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGHUP)


def reloads() -> int:
    return sum(thread.name == "reload" for thread in threading.enumerate())


def test_signals_during_a_reload_cause_one_more():
    begun, may_end, changes = threading.Event(), threading.Event(), []

    def change_tp(tp: int) -> bool:
        changes.append(tp)
        begun.set()
        return may_end.wait(WAIT_SECONDS)

    tps = iter(range(2, 10))
    reload_on_hangup(ServeConfig(), lambda: ServeConfig(tp=next(tps)), change_tp, Supervisor())
    hang_up()
    assert begun.wait(WAIT_SECONDS)
    hang_up(50)
    assert reloads() == 2
    may_end.set()
    wait_for(lambda: not reloads())
    assert changes == [2, 3]
    hang_up()
    wait_for(lambda: changes == [2, 3, 4])


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (None, ["nothing was read again, because the server was started without --config"]),
        (ServeConfig(), ["the TP size has not changed, nor has any other option"]),
        (ServeConfig(tp=2), ["and the TP size has changed"]),
        (ServeConfig(port=1), ["option port has changed; it takes effect at the next start", "has not changed"]),
    ],
)
def test_a_reload_says_what_it_has_changed(new: ServeConfig | None, said: list[str], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    reload_on_hangup(ServeConfig(), None if new is None else lambda: new, bool, Supervisor())
    hang_up()
    wait_for(lambda: not reloads())
    assert len(caplog.messages) == len(said)
    for message, part in zip(caplog.messages, said, strict=True):
        assert part in message


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_a_server_that_takes_no_requests_changes_nothing(state: str):
    """Otherwise it would compile every program for an engine that is about to stop."""

    def change_tp(tp: int) -> bool:
        raise AssertionError("compiles")

    serving = _Serving(ServeConfig(), Alone(), Supervisor(), StartClock(0.0))
    launched: Any = SimpleNamespace(resharder=SimpleNamespace(change_tp=change_tp), close=bool)
    serving.launched = launched
    if state == "draining":
        serving.edge.attach(Backend(FakeEngine(print), Letters(), INFO))  # type: ignore[arg-type]
        serving.edge.accept()
        serving.edge.refuse("the server is stopping; try another replica")
    with pytest.raises(EngineStoppedError, match="the server is st"):
        serving.change_tp(2)
    serving.close()
