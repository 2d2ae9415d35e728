"""Realistic traffic through scheduler, pages and batches: `make simulate` runs it with 20,000 requests a case."""

import contextlib
import random

import pytest

from meshserve.runtime.api.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.scheduler.limits import SchedulerLimits
from tests.runtime.fake_copies import FakeCopies, make_size
from tests.runtime.simulation import VOCAB_SIZE, Simulation, make_request
from tests.runtime.trace import Arrival, Traffic, make_trace

MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS, MAX_CONTEXT = 60, 40, 512
MAX_RUNNING, PAGE_SIZE = 32, 16


def requests_of(arrival: Arrival, number: int, seed: int, history: tuple[int, ...], now: float) -> list[Request]:
    timeout_seconds = arrival.options.timeout_seconds
    return [
        make_request(
            seed + index,
            max_tokens=arrival.max_tokens,
            ignore_eos=arrival.ignore_eos,
            prompt=history + arrival.prompt,
            request_id=f"r{number}",
            index=index,
            priority=arrival.options.priority,
            cache_salt=arrival.options.cache_salt,
            deadline_seconds=float("inf") if timeout_seconds is None else now + timeout_seconds,
        )
        for index in range(arrival.options.n)
    ]


def replay(simulation: Simulation, trace: list[Arrival]) -> dict[str, int]:
    """Runs a trace to its end. Returns how many samples met which fate before the engine saw them."""
    served: dict[int, list[Request]] = {}
    leaving: list[tuple[float, Request]] = []
    refused = {"full": 0, "too long": 0}
    seed = 1
    for number, arrival in enumerate(trace):
        while simulation.now < arrival.step:
            simulation.step()
            if not simulation.scheduler.has_work and not simulation.in_flight:
                simulation.now = max(simulation.now, float(arrival.step))
            for moment, request in leaving:
                if moment <= simulation.now:
                    simulation.finish(request)
            leaving = [(moment, request) for moment, request in leaving if moment > simulation.now]
        before = served.get(arrival.follows, ()) if arrival.follows is not None else ()
        history = tuple(before[0].tokens(0, before[0].num_known_tokens)) if before else ()
        requests = requests_of(arrival, number, seed, history, simulation.now)
        seed += len(requests)
        try:
            simulation.add(*requests)
        except (InvalidRequestError, QueueFullError) as error:
            refused["full" if isinstance(error, QueueFullError) else "too long"] += len(requests)
            continue
        served[number] = requests
        if arrival.cancel_after_steps is not None:
            leaving += [(simulation.now + arrival.cancel_after_steps, request) for request in requests]
    simulation.drain()
    return refused


def limits_of(**changes: float) -> SchedulerLimits:
    values = dict(
        page_size=PAGE_SIZE,
        max_running=MAX_RUNNING,
        max_step_tokens=256,
        max_waiting=200,
        max_context=MAX_CONTEXT,
        max_prefill_tokens=192,
        draft_min_match=1,
        step_sizes=(64, 128, 256),
        priority_seconds=100.0,
    )
    return SchedulerLimits(**(values | changes))


def num_pages_for(demand: float) -> int:
    mean_pages = -(-(MEAN_PROMPT_TOKENS + MAX_CONTEXT // 8 + MEAN_OUTPUT_TOKENS) // PAGE_SIZE)
    return max(int(MAX_RUNNING * mean_pages / demand), -(-MAX_CONTEXT // PAGE_SIZE))


def traffic_of(demand: float, num_requests: int) -> Traffic:
    return Traffic(
        num_requests=num_requests,
        max_context=MAX_CONTEXT,
        mean_prompt_tokens=MEAN_PROMPT_TOKENS,
        mean_output_tokens=MEAN_OUTPUT_TOKENS,
        requests_per_step=0.5 if demand > 1.0 else 0.7 * demand,
        vocab=range(1, VOCAB_SIZE),
    )


@pytest.mark.parametrize("demand", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("max_decode_steps", "draft_tokens"), [(1, 0), (4, 0), (1, 7), (4, 3)])
def test_everything_ends_whatever_the_demand(
    demand: float, max_decode_steps: int, draft_tokens: int, num_simulated: int
) -> None:
    """Demand: the pages that max_running mean requests need together, over those of the cache."""
    limits = limits_of(max_decode_steps=max_decode_steps, draft_tokens=draft_tokens)
    simulation = Simulation(limits, num_pages_for(demand))
    draw = random.Random(f"{demand} {max_decode_steps} {draft_tokens}")
    refused = replay(simulation, make_trace(draw, traffic_of(demand, num_simulated)))
    report(simulation, refused)
    assert sum(refused.values()) + len(simulation.accepted) == num_simulated
    assert simulation.scheduler.num_preemptions > 0 or demand <= 1.0
    speculation = simulation.scheduler.speculation
    assert 0 < speculation.num_accepted < speculation.num_drafts or not draft_tokens
    assert simulation.num_cached_tokens > simulation.num_prefill_tokens / 20


@pytest.mark.parametrize("demand", [1.0, 3.0])
@pytest.mark.parametrize(("draft_tokens", "failing"), [(0, 0.0), (3, 0.05)])
def test_evicted_pages_come_back_from_host_memory(
    demand: float, draft_tokens: int, failing: float, num_simulated: int
) -> None:
    """Copies take up to eight steps, and some fail; every step audits the pages of the device and of the host."""
    num_pages = num_pages_for(demand)
    copies = FakeCopies(make_size(num_blocks=num_pages, block_pages=4), seed=7, max_polls=8, failing=failing)
    simulation = Simulation(limits_of(draft_tokens=draft_tokens), num_pages, copies=copies)
    draw = random.Random(f"host {demand} {draft_tokens}")
    refused = replay(simulation, make_trace(draw, traffic_of(demand, num_simulated)))
    report(simulation, refused)
    assert simulation.host is not None
    counts = simulation.host.counts
    print(f"{simulation.num_fetching_steps} steps beside requests that were fetching; {counts}")
    assert counts.num_saved > counts.num_restored > num_simulated / 20
    assert (counts.num_failed > 0) == (failing > 0.0) and simulation.num_fetching_steps > 0
    assert counts.num_resumed > 0, "preempted requests get their pages from host memory, too"


class LateMasks(Simulation):
    """The masks of some tokens come late, and of some requests always, as the engine handles it."""

    def __init__(self, limits: SchedulerLimits, num_pages: int, draw: random.Random):
        super().__init__(limits, num_pages)
        self.draw = draw
        self.ready_at: dict[Request, float] = {}
        self.num_withdrawn = self.num_cut = 0

    def step(self) -> None:
        plan = self.dispatch()
        if self.in_flight and (plan is None or len(self.in_flight) > self.num_steps_ahead):
            self.collect_late()
        for request, moment in list(self.ready_at.items()):
            if moment <= self.now or request.is_finished:
                del self.ready_at[request]
                self.scheduler.set_blocked(request, False)
            else:
                self.scheduler.set_blocked(request, True)
        requests = plan.requests if plan is not None else []
        for index, request in enumerate(requests):
            if request.is_blocked and not request.is_finished:
                self.scheduler.withdraw(request)
                self.num_valid.setdefault(id(plan), {})[index] = 0
                self.num_withdrawn += 1
                continue
            if request.num_pending_tokens and request.seed % 4 == 0:
                self.scheduler.set_blocked(request, True)
            if plan is not None and index < len(plan.drafts) and self.draw.random() < 0.3:  # no masks after some drafts
                self.num_valid.setdefault(id(plan), {})[index] = self.draw.randint(1, len(plan.sample_rows[index]))
                self.num_cut += 1
        self.scheduler.audit()

    def collect_late(self) -> None:
        """Collects the oldest step. The next one is planned before it shows which masks are late."""
        for request, _ in self.collect():
            if not request.is_finished and (request.seed % 4 == 0 or self.draw.random() < 0.3):
                self.ready_at[request] = self.now + self.draw.randint(1, 5)

    def rebuild(self) -> None:
        """Preempts all requests for an empty cache, as between two meshes."""
        while self.in_flight:
            self.collect_late()
        self.scheduler.preempt_all()
        self.allocator.reset(self.allocator.num_pages)
        self.scheduler.audit()


@pytest.mark.parametrize("demand", [0.5, 3.0])
@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize(("num_tenants", "draft_tokens"), [(1, 0), (2, 0), (2, 3)])
def test_requests_whose_masks_are_late_lose_nothing(
    demand: float, has_prefix_cache: bool, num_tenants: int, draft_tokens: int, num_simulated: int
) -> None:
    draw = random.Random(f"{demand} {has_prefix_cache} {num_tenants}")
    limits = SchedulerLimits(
        page_size=4, max_running=8, max_step_tokens=32, max_waiting=200, max_context=64,
        has_prefix_cache=has_prefix_cache, draft_tokens=draft_tokens, draft_min_match=1,
    )  # fmt: skip
    simulation = LateMasks(limits, num_pages=int(8 * 16 / demand), draw=draw)
    for seed in range(1, min(num_simulated, 2_000)):
        request = make_request(
            seed, draw.randint(1, 20), max_tokens=draw.randint(1, 40), tenant=draw.choice(("a", "b")[:num_tenants])
        )
        with contextlib.suppress(QueueFullError):
            simulation.add(request)
        for _ in range(draw.randint(0, 12)):
            simulation.step()
        if draw.random() < 0.1:
            simulation.finish(draw.choice(simulation.accepted))
        if draw.random() < 0.1:
            simulation.rebuild()
    for _ in range(100_000):
        if not (simulation.scheduler.has_work or simulation.in_flight):
            break
        simulation.step()
    simulation.drain()
    assert simulation.num_withdrawn > 0 and (simulation.scheduler.num_preemptions > 0 or demand < 1.0)
    accepted = simulation.scheduler.speculation.num_accepted
    assert (accepted > 0) == (simulation.num_cut > 0) == (draft_tokens > 0)


def report(simulation: Simulation, refused: dict[str, int]) -> None:
    scheduler = simulation.scheduler
    ends = {reason.value: 0 for reason in FinishReason}
    for request in simulation.accepted:
        assert request.finish_reason is not None
        ends[request.finish_reason.value] += 1
    waits = sorted(simulation.queue_seconds)
    print(
        f"\n{len(simulation.accepted)} served, refused {refused}; ends {ends}; {simulation.num_steps} dispatches; "
        f"{simulation.num_prefill_tokens} tokens prefilled, {simulation.num_cached_tokens} cached; "
        f"{scheduler.num_preemptions} preemptions, {simulation.allocator.num_evictions} evictions, "
        f"{scheduler.num_wasted_tokens} wasted tokens; queue p50 {waits[len(waits) // 2]:.0f}, "
        f"p99 {waits[len(waits) * 99 // 100]:.0f}, longest {waits[-1]:.0f} steps"
    )
