"""Measures the host time of a step without a device: planning, batch building and accounting.

    python benchmarks/engine/scheduler.py [--json FILE]

The workload is a steady decode: every slot holds a request that gets a token in each step, one step is in flight, pages
have 32 tokens, and the prefix cache is on. Prints medians and the 99th percentile over the steps. The time is the CPU
time of this thread, so that a busy machine does not distort it. `make bench-scheduler` pins the process to one core.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from meshserve.runtime.api.request import Request
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.program.batch import BatchBuilder
from meshserve.runtime.program.processors.processor_batch import ProcessorBatchBuilder
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan

RUNNING = (16, 64, 256, 1024)
QUEUED = (0, 1_000, 100_000)
BUDGET_US = 500.0  # limit of the total with 256 running requests
_PAGE_SIZE = 32
_NUM_WARM_UP_STEPS, _NUM_STEPS = 100, 500
_STEP_SECONDS = 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench-scheduler", description="Measure the host time of a scheduling step.")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    print("running  queued    plan   build account   total     p99   us per step")
    results = []
    for num_running in RUNNING:
        for num_queued in QUEUED:
            result = measure(num_running, num_queued)
            results.append(result)
            times = "".join(f"{result[name]:8.0f}" for name in ("plan", "build", "account", "total", "total_p99"))
            print(f"{num_running:7d}{num_queued:8d}{times}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(any(result["total"] > BUDGET_US for result in results if result["num_running"] == 256))


def measure(num_running: int, num_queued: int) -> dict[str, float]:
    """Returns the microseconds of each part of a step, by the thread's CPU clock."""
    scheduler, batches = _make(num_running, num_queued)
    flight, now = None, 0.0
    times: list[tuple[float, float, float]] = []
    gc.collect()
    gc.freeze()
    for step in range(_NUM_WARM_UP_STEPS + _NUM_STEPS):
        now += _STEP_SECONDS
        started = time.thread_time()
        plan = scheduler.plan(now)
        planned = time.thread_time()
        assert plan is not None
        batches.build(plan)
        built = time.thread_time()
        account = _account(scheduler, flight, now) if flight is not None else 0.0
        flight = plan
        if step >= _NUM_WARM_UP_STEPS:
            assert len(plan.decodes) == num_running, "not a steady decode"
            times.append((planned - started, built - planned, account))
    gc.unfreeze()
    totals = sorted(1e6 * sum(parts) for parts in times)
    plan_us, build_us, account_us = (1e6 * statistics.median(part) for part in zip(*times, strict=True))
    return {
        "num_running": num_running,
        "num_queued": num_queued,
        "plan": plan_us,
        "build": build_us,
        "account": account_us,
        "total": statistics.median(totals),
        "total_p99": totals[len(totals) * 99 // 100],
    }


def _account(scheduler: Scheduler, flight: StepPlan, now: float) -> float:
    tokens = [7] * flight.num_requests
    started = time.thread_time()
    scheduler.account(flight, tokens, now)
    return time.thread_time() - started


def _make(num_running: int, num_queued: int) -> tuple[Scheduler, BatchBuilder]:
    """Fills every slot with a request that outlasts the measurement; all others wait, with priorities and deadlines."""
    max_output_tokens = _NUM_WARM_UP_STEPS + _NUM_STEPS + 100
    max_step_tokens = max(64 * num_running, 2048)
    limits = SchedulerLimits(
        page_size=_PAGE_SIZE,
        max_running=num_running,
        max_step_tokens=max_step_tokens,
        max_waiting=num_running + num_queued,
        max_context=4096,
    )
    pages = PageAllocator(num_running * limits.num_pages_for(max_output_tokens + 96))
    scheduler = Scheduler(limits, pages, frozenset({0}))
    buckets = declare_buckets(max_step_tokens=max_step_tokens, max_running=num_running, page_size=_PAGE_SIZE)
    batches = BatchBuilder(
        buckets,
        max_running=num_running,
        page_size=_PAGE_SIZE,
        max_request_pages=4096 // _PAGE_SIZE,
        processors=ProcessorBatchBuilder(max_running=num_running, vocab_size=151_936, eos_token_ids=frozenset()),
    )
    draw = random.Random(0)
    for number in range(num_running + num_queued):
        is_queued = number >= num_running
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(draw.randrange(1, 1000) for _ in range(draw.randint(1, 63))),
            params=SamplingParams(max_tokens=max_output_tokens, temperature=0.7, top_p=0.9, top_k=50),
            seed=number,
            priority=-draw.randint(0, 2) if is_queued else 0,
            deadline_seconds=1e6 if is_queued and number % 2 else float("inf"),
            arrival_seconds=1e-6 * number,
        )
        scheduler.add(request)
    return scheduler, batches


if __name__ == "__main__":
    raise SystemExit(main())
