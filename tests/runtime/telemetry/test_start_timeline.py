"""Phases of a start add up to its time, and the log tells them."""

import time

import jax.monitoring
import pytest

from meshserve.runtime.telemetry import start_timeline
from meshserve.runtime.telemetry.start_timeline import StartClock, listening, process_began, read_timeline


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(start_timeline.time, "monotonic", lambda: now)
    clock = StartClock(8.0)
    clock.begin("weights")
    now = 13.0
    clock.begin("programs")
    now = 13.5
    clock.begin("weights")
    now = 14.0
    clock.add("/jax/core/compile/backend_compile_duration", 4.0)
    clock.add("/jax/core/compile/backend_compile_duration", 2.0)
    clock.add("/jax/compilation_cache/cache_retrieval_time_sec", 1.0)
    clock.add("/jax/something/else", 5.0)
    timeline = clock.end()
    assert timeline.total == 6.0
    assert timeline.phases == {"imports": 2.0, "weights": 3.5, "programs": 0.5}
    assert timeline.within == {"XLA": 5.0, "reading jax's cache": 1.0}
    assert read_timeline(f"INFO x: before\nINFO serve: {timeline}\nINFO x: after\n") == timeline
    with pytest.raises(ValueError, match="use a text log of a server that became ready"):
        read_timeline("INFO x: before")


def test_what_jax_and_kernels_report_is_heard_within_the_context():
    clock = StartClock(time.monotonic())
    with listening(clock):
        jax.monitoring.record_event_duration_secs("/meshserve/kernels/compile_duration", 3.0)
    jax.monitoring.record_event_duration_secs("/meshserve/kernels/compile_duration", 4.0)
    assert clock.end().within == {"nvcc": 3.0}


def test_the_process_began_before_now():
    assert process_began() <= time.monotonic() and process_began() == pytest.approx(process_began(), abs=0.1)
