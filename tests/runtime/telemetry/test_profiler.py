"""What recording a profile refuses; `tests/test_operations.py` records one."""

from collections.abc import Callable

import jax
import pytest

from meshserve.runtime.api.errors import UnavailableFeatureError
from meshserve.runtime.telemetry.profiler import Profiler


def at_once(action: Callable[[], None]) -> None:
    action()


def test_an_error_of_the_recorder_is_the_callers_and_does_not_end_the_engine(tmp_path, monkeypatch):
    def between_steps(action: Callable[[], None]) -> None:
        action()  # an error here would end the engine
        calls.append("between")

    def fail(*_: object) -> None:
        raise RuntimeError("no profiler here")

    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    profiler = Profiler(tmp_path)
    with pytest.raises(RuntimeError, match="no profiler here"):
        profiler.start(between_steps)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    profiler.start(between_steps)
    profiler.stop(between_steps)
    assert calls == ["between", "start", "between", "stop", "between"]
    profiler.start(between_steps)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    with pytest.raises(RuntimeError, match="no profiler here"):
        profiler.stop(between_steps)
    profiler.start(between_steps)  # what could not be written does not stand in the way


def test_a_folder_that_cannot_be_is_refused_by_name_and_nothing_is_recorded(tmp_path):
    (tmp_path / "file").write_text("")
    profiler = Profiler(tmp_path / "file")
    for _ in range(2):  # the first left nothing behind
        with pytest.raises(
            UnavailableFeatureError,
            match=r"cannot create a folder for the profile in .*file: Not a directory\. Restart with",
        ):
            profiler.start(at_once)
    with pytest.raises(UnavailableFeatureError, match="no profile is being recorded"):
        profiler.stop(at_once)
