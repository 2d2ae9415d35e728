"""Runs the scheduler and the host tier in virtual time, on a GPU of which only the times are simulated.

The times are those of an 8B on an H100 (docs/log/scheduler.md). What is to be computed forms one queue, copies form one
each way. The loop is that of `engine.Engine`: the host plans one step ahead, and sees what happened during a step when
it has collected it.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from meshserve.runtime.api.request import Request
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.host_cache.commands import Op
from meshserve.runtime.host_cache.host_cache import HostCache
from meshserve.runtime.host_cache.sizes import HostCacheSize
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTimes:
    """What things take, in seconds."""

    decodes: float = 5.4e-3  # reading the weights
    decode: float = 0.01e-3  # each of them
    context_token: float = 147_456 / 2.6e12  # for a decode
    prompt_token: float = 23.3e-6
    prompt_token_and_position: float = 0.98e-9  # attention
    scatter: float = 0.107e-3  # a block
    gather: float = 0.079e-3
    byte_to_device: float = 1 / 48.4e9
    byte_to_host: float = 1 / 54.3e9
    plan: float = 0.4e-3  # and dispatch, on the host
    command: float = 0.12e-3  # on the host
    client: float = 3.0e-3  # from the end of a request to the next one
    # Whether a step waits for the blocks that were sent before its input, beside other steps, and whether a block waits
    # for the steps that were dispatched before it. An H200 does both, by decodes beside restores.
    do_inputs_wait: bool = False
    do_blocks_wait: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that was collected."""

    num_prompt_tokens: int
    seconds: float  # since the one before it, or since it was dispatched


class VirtualCopies:
    """Implements `host_cache.Copier`: copies end at times of the GPU's clock."""

    def __init__(self, size: HostCacheSize, gpu: "VirtualGpu"):
        self.size, self.gpu = size, gpu
        self.arrivals: dict[int, float] = {}  # by ticket
        self.saving: deque[float] = deque()
        self.last_arrival = self.last_saved = 0.0

    def run(self, command: np.ndarray) -> None:
        gpu, times, num_bytes = self.gpu, self.gpu.times, self.size.block_bytes
        op, *numbers = command.tolist()
        if op == Op.SAVE:
            self.last_saved = max(self.last_saved, gpu.compute(times.gather)) + num_bytes * times.byte_to_host
            self.saving.append(self.last_saved)
        elif op == Op.FETCH:
            began = max(self.last_arrival, gpu.now, gpu.busy_until if times.do_blocks_wait else 0.0)
            self.last_arrival = self.arrivals[numbers[0]] = began + num_bytes * times.byte_to_device
        elif op == Op.WRITE:
            assert self.arrivals.pop(numbers[0]) <= gpu.now, "written before it has arrived"
            gpu.compute(times.scatter)
        elif op == Op.FORGET:
            del self.arrivals[numbers[0]]

    def has_arrived(self, ticket: int) -> bool | None:
        return self.arrivals[ticket] <= self.gpu.now or None

    def wait(self, ticket: int) -> None:
        self.gpu.now = max(self.gpu.now, self.arrivals[ticket])

    def wait_saved(self) -> None:
        if self.saving:
            self.gpu.now = max(self.gpu.now, self.saving[0])

    def num_saving(self) -> int:
        while self.saving and self.saving[0] <= self.gpu.now:
            self.saving.popleft()
        return len(self.saving)

    def take_failed(self) -> list[tuple[int, bool]]:
        return []

    def adopt(self, block: int, shards: object) -> None:
        raise AssertionError("nothing is kept between two runs")


class VirtualGpu:
    """An engine on one simulated GPU.

    Args:
      limits: The scheduler's limits.
      num_pages: The pages on the GPU.
      size: The sizes of the host tier; None without one.
      times: What the GPU takes.
    """

    def __init__(self, limits: SchedulerLimits, num_pages: int, size: HostCacheSize | None, times: GpuTimes):
        self.limits, self.times = limits, times
        self.pages = PageAllocator(num_pages)
        self.copies = VirtualCopies(size, self) if size is not None else None
        self.host = HostCache(self.pages, limits, self.copies) if self.copies is not None else None
        self.scheduler = Scheduler(limits, self.pages, frozenset())
        self.now = 0.0  # on the host
        self.busy_until = 0.0  # on the GPU
        self.flight: tuple[StepPlan, float, float] | None = None  # with its dispatch and its end
        self.last_collected = 0.0
        self.steps: list[Step] = []
        self.token_times: dict[Request, list[float]] = {}
        self.to_come: deque[tuple[float, Request]] = deque()

    def compute(self, seconds: float) -> float:
        """Adds work to the GPU's queue. Returns when it will have been done."""
        self.busy_until = max(self.busy_until, self.now) + seconds
        return self.busy_until

    def submit(self, request: Request) -> None:
        request.arrival_seconds = self.now
        self.scheduler.prepare([request])
        self.scheduler.add(request)
        self.token_times[request] = []

    def step_seconds(self, plan: StepPlan) -> float:
        times = self.times
        seconds = sum(plan.starts) * times.context_token + len(plan.decodes) * times.decode
        if not plan.prefills:
            return seconds + times.decodes
        for chunk in plan.prefills:
            seconds += chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) * times.prompt_token_and_position
        num_padded = self.limits.sizes_around(plan.num_batch_tokens)[1]
        return seconds + max(num_padded * times.prompt_token, 1.2 * times.decodes)

    def dispatch(self) -> tuple[StepPlan, float, float] | None:
        while self.to_come and self.to_come[0][0] <= self.now:
            self.submit(self.to_come.popleft()[1])
        for arrival in self.host.arrivals(self.now) if self.host is not None else ():
            self.scheduler.arrived(*arrival)
        plan = self.scheduler.plan(self.now)
        sent_before = self.copies.last_arrival if self.copies is not None else 0.0
        if self.host is not None and self.copies is not None:
            for command in self.host.take_commands(self.now, plan):
                self.now += self.times.command
                self.copies.run(command)
        if plan is None:
            return None
        self.now += self.times.plan
        if self.times.do_inputs_wait:
            self.busy_until = max(self.busy_until, sent_before)
        return plan, self.now, self.compute(self.step_seconds(plan))

    def collect(self, flight: tuple[StepPlan, float, float]) -> None:
        plan, dispatched, end = flight
        self.now = max(self.now, end)
        self.steps.append(Step(plan.num_prefill_tokens, self.now - max(self.last_collected, dispatched)))
        self.last_collected = self.now
        for request, _ in self.scheduler.account(plan, [1] * plan.num_requests, self.now):
            self.token_times[request].append(self.now)
        if self.host is not None:
            self.host.collected(plan, dispatched, self.now)

    def step(self) -> None:
        """Does what the engine does in one turn of its loop."""
        flight = self.dispatch()
        if self.flight is not None:
            self.collect(self.flight)
        elif flight is None and not self.scheduler.has_work and self.to_come:
            self.now = max(self.now, self.to_come[0][0])
        elif flight is None and self.host is not None:
            self.host.wait()
        self.flight = flight

    def request(self, prompt: Sequence[int], num_tokens: int) -> Request:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        return Request(request_id="", prompt_token_ids=tuple(prompt), params=params, seed=0)

    def serve(self, prompts: Iterable[Sequence[int]], num_at_a_time: int, num_tokens: int) -> None:
        """Serves prompts in order; all but the first are submitted when the one `num_at_a_time` before has ended."""
        requests = [self.request(prompt, num_tokens) for prompt in prompts]
        for request in requests[:num_at_a_time]:
            self.submit(request)
        num_sent = num_at_a_time
        while self.scheduler.has_work or self.to_come or self.flight:
            self.step()
            sent = self.now
            while num_sent < len(requests) and requests[num_sent - num_at_a_time].is_finished:
                sent += self.times.client
                self.to_come.append((sent, requests[num_sent]))
                num_sent += 1
