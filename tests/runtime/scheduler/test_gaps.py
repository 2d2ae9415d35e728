"""Tests the gaps between tokens of requests that arrive at random, with the times of an 8B on an H100."""

import dataclasses
from itertools import pairwise

import pytest

from meshserve.benchmarks.lib.open_loop import OpenLoop
from meshserve.benchmarks.lib.token_times import percentile
from meshserve.benchmarks.lib.workloads import fixed
from meshserve.runtime.scheduler.limits import SchedulerLimits
from tests.runtime.virtual_gpu import GpuTimes, VirtualGpu

AUTOMATIC = SchedulerLimits(
    page_size=32, max_running=256, max_step_tokens=8192, max_waiting=1024, max_context=4096, max_prefill_tokens=4096,
    low_load_prefill_tokens=1024, step_sizes=(64, 128, 256, 512, 1024, 2048, 4096, 8192),
)  # fmt: skip
ALWAYS_LONG = dataclasses.replace(AUTOMATIC, low_load_prefill_tokens=0)
ALWAYS_SHORT = dataclasses.replace(AUTOMATIC, max_prefill_tokens=1024, low_load_prefill_tokens=0)
NUM_PAGES = 12_500


def gap_ms(limits: SchedulerLimits, rate: float) -> float:
    """Serves 8 s of Poisson arrivals and returns the P99 of gaps in ms."""
    search = OpenLoop(input_tokens="uniform:512:1024", output_tokens="uniform:64:256", first_rate=rate)
    gpu = VirtualGpu(limits, NUM_PAGES, None, GpuTimes())
    works, arrivals = search.requests(rate, 8.0, 0)
    requests = [gpu.request(work.prompt_token_ids, work.max_tokens) for work in works]
    gpu.to_come.extend(zip(arrivals, requests, strict=True))
    while gpu.scheduler.has_work or gpu.to_come or gpu.flight:
        gpu.step()
    gaps = [after - before for request in requests for before, after in pairwise(gpu.token_times[request])]
    return 1e3 * percentile(gaps, 99)


def full_load_seconds(limits: SchedulerLimits) -> float:
    gpu = VirtualGpu(limits, NUM_PAGES, None, GpuTimes())
    for work in fixed(0, 128, 1024, 64, 9999):
        gpu.submit(gpu.request(work.prompt_token_ids, work.max_tokens))
    while gpu.scheduler.has_work or gpu.flight:
        gpu.step()
    return gpu.now


@pytest.mark.parametrize(("rate", "most"), [(22.6, 32.0), (30.0, 40.0)])
def test_gaps_stay_short_at_rates_at_which_long_steps_delay_tokens(rate: float, most: float):
    assert gap_ms(AUTOMATIC, rate) < most
    assert gap_ms(ALWAYS_LONG, rate) > 50.0


def test_short_steps_cost_a_full_load_nothing():
    long = full_load_seconds(ALWAYS_LONG)
    assert full_load_seconds(AUTOMATIC) < 1.005 * long and full_load_seconds(ALWAYS_SHORT) > 1.02 * long
