"""Tests that the time of an engine is divided among its steps, and what is left is the time without one."""

import pytest

from meshserve.benchmarks.lib.step_seconds import StepSeconds
from meshserve.runtime.engine.step_record import StepRecord


def make_record(step_seconds: float, num_decodes: int, num_prefill_tokens: int = 0, num_running: int = 8) -> StepRecord:
    return StepRecord(
        num_running=num_running, max_running=8, num_waiting=2, num_pages=9, num_free_pages=1, num_evictable_pages=0,
        num_decodes=num_decodes, num_prefills=num_prefill_tokens > 0, num_prefill_tokens=num_prefill_tokens,
        num_decode_tokens=num_decodes, num_padding_tokens=0, num_steps=1, queue_seconds=(), num_admitted_tokens=0,
        num_cached_tokens=0, num_preempted=1, host_seconds=0.0, step_seconds=step_seconds,
    )  # fmt: skip


def test_each_second_is_counted_once() -> None:
    now = [0.0]
    steps = StepSeconds(lambda: now[0])

    def collect(seconds: float, record: StepRecord) -> None:
        now[0] = seconds
        steps.record(record)

    collect(1.0, make_record(1.0, num_decodes=8))
    collect(1.5, make_record(1.5, num_decodes=6))  # was dispatched beside the first; two requests have no work
    collect(4.0, make_record(0.5, num_decodes=7, num_prefill_tokens=100))  # two seconds after the second had ended
    collect(4.25, make_record(0.5, num_decodes=8))
    decodes, beside_copies, prompts, idle = str(steps).splitlines()
    assert steps.idle_seconds == pytest.approx(2.0) and "2.00 s without a step; 4 preemptions" in idle
    assert "1.25 s in 2 steps of decodes, 625.0 ms each: 8.0 decodes" in decodes
    assert "0.50 s in 1 steps" in beside_copies and "2.0 requests without work, 2.0 queued" in beside_copies
    assert "0.50 s in 1 steps of prompts" in prompts and "100.0 prompt tokens" in prompts
    assert steps.decode_seconds == pytest.approx([1.0, 0.5, 0.25]), "of a step that waits for the one before, once"
    steps.reset()
    assert steps.idle_seconds == 0.0 and not steps.decode_seconds and "0 steps of prompts" in str(steps)
