"""Simulates a device without a model, and an engine loop with steps in flight, to test the scheduler.

The device is driven only by the packed vectors of `batch.py`. It keeps its own page table and, for each position of
each page, a hash of all tokens up to the one whose key and value are stored there. Each chunk must find all positions
before its own, so holes, repeated or skipped positions, and pages that have two owners or are shared or reused too
early are detected at once. Tokens depend only on (request seed, position), so the output of every request must as well.
"""

from collections import deque

import numpy as np
from hypothesis import strategies as st

from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.host_cache.host_cache import HostCache
from meshserve.runtime.program.batch import ON_DEVICE, BatchBuilder, StepBatch
from meshserve.runtime.program.processors.processor_batch import ProcessorBatchBuilder
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import Progress, StepPlan
from tests.runtime.fake_copies import FakeCopies

EOS_TOKEN_ID = 0
VOCAB_SIZE = 40  # one sampled token in 40 ends its request
_MASK = 2**64 - 1


def token_of(seed: int, position: int) -> int:
    """Returns what the model samples at this position of the request with this seed; some seeds give repeating
    tokens.
    """
    if seed % 3 == 0:
        position %= 11
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & _MASK
    return (mixed >> 32) % VOCAB_SIZE


def chained(before: int, token_id: int) -> int:
    """Returns the hash of a sequence with one more token."""
    return (before * 6364136223846793005 + token_id + 1) & _MASK


def make_limits(**changes: float) -> SchedulerLimits:
    values = dict(page_size=4, max_running=4, max_step_tokens=16, max_waiting=8, max_context=32)
    return SchedulerLimits(**(values | changes))


@st.composite
def tight_limits(draw: st.DrawFn) -> tuple[SchedulerLimits, int]:
    """Draws limits and a number of pages, from a cache with room for one request to one with room for many."""
    max_running = draw(st.integers(1, 6))
    page_size = draw(st.integers(1, 5))
    max_context = draw(st.integers(2, 24))
    max_prefill_tokens = draw(st.sampled_from([0, 1, 3]))
    limits = SchedulerLimits(
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=draw(st.integers(max_running, max_running + 12)),
        max_waiting=draw(st.integers(1, 12)),
        max_context=max_context,
        max_prefill_tokens=max_prefill_tokens,
        low_load_prefill_tokens=draw(st.integers(0, max_prefill_tokens)),
        max_decode_steps=draw(st.integers(1, page_size)),
        draft_tokens=draw(st.integers(0, page_size - 1)),
        draft_min_match=draw(st.integers(1, 3)),
        step_sizes=draw(st.sampled_from([(), (3, 6), (2, 4, 8, 16)])),
        priority_seconds=draw(st.sampled_from([0.0, 5.0, 1000.0])),
        has_prefix_cache=draw(st.booleans()),
    )
    needed_by_one = -(-(max_context - 1) // page_size)
    return limits, draw(st.integers(1, 3 * needed_by_one))


def make_request(
    seed: int,
    num_prompt_tokens: int = 3,
    max_tokens: int | None = 4,
    ignore_eos: bool = False,
    prompt: tuple[int, ...] | None = None,
    **fields: object,
) -> Request:
    own_prompt = tuple(1 + (seed + i) % (VOCAB_SIZE - 1) for i in range(num_prompt_tokens))
    return Request(
        **{"request_id": f"r{seed}", **fields},
        prompt_token_ids=own_prompt if prompt is None else prompt,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        seed=seed,
    )


def output_alone(request: Request, max_context: int) -> tuple[list[int], FinishReason]:
    """Returns the expected output of the request, whatever else is served."""
    num_prompt_tokens = len(request.prompt_token_ids)
    tokens: list[int] = []
    for position in range(num_prompt_tokens, request.params.total_tokens(num_prompt_tokens, max_context)):
        token_id = token_of(request.seed, position)
        if token_id == EOS_TOKEN_ID and not request.params.ignore_eos:
            return tokens, FinishReason.STOP
        tokens.append(token_id)
    return tokens, FinishReason.LENGTH


class FakeDevice:
    """Runs steps immediately and in order; the host chooses when to read the tokens."""

    def __init__(self, limits: SchedulerLimits, num_pages: int):
        max_request_pages = limits.num_pages_for(limits.max_context)
        buckets = declare_buckets(
            max_step_tokens=limits.max_step_tokens,
            max_running=limits.max_running,
            page_size=limits.page_size,
            max_decode_steps=limits.max_decode_steps,
        )
        self.batches = BatchBuilder(
            buckets,
            max_running=limits.max_running,
            page_size=limits.page_size,
            max_request_pages=max_request_pages,
            processors=ProcessorBatchBuilder(
                max_running=limits.max_running, vocab_size=1000, eos_token_ids=frozenset()
            ),
            has_drafts=limits.draft_tokens > 0,
        )
        self.page_size, self.max_context, self.no_slot = limits.page_size, limits.max_context, limits.max_running
        self.cache = np.zeros((num_pages, limits.page_size), np.uint64)
        self.page_table = np.full((limits.max_running, max_request_pages), -1, np.int32)
        self.last_tokens = np.full(limits.max_running, -1, np.int32)
        self.expected: dict[int, np.ndarray] = {}  # the hash at every position, by the request's seed

    def expect(self, request: Request) -> None:
        num_prompt_tokens, before, hashes = len(request.prompt_token_ids), 0, []
        for position in range(request.params.total_tokens(num_prompt_tokens, self.max_context)):
            is_prompt = position < num_prompt_tokens
            token_id = request.prompt_token_ids[position] if is_prompt else token_of(request.seed, position)
            hashes.append(before := chained(before, token_id))
        assert request.seed not in self.expected
        self.expected[request.seed] = np.array(hashes, np.uint64)

    def run(self, batch: StepBatch) -> list[list[int]]:
        """Returns the sampled token of each position of each step, including padding; other positions get arbitrary
        values.
        """
        bucket, packed, page_table_rows, _ = batch
        for slot, *pages in page_table_rows:
            self.page_table[slot] = pages
        fields = {name: packed[place] for name, place in bucket.fields.items()}
        for slot, index, page in zip(fields["page_slot"], fields["page_index"], fields["page"], strict=True):
            if slot != self.no_slot:
                self.page_table[slot, index] = page
        return [self.step(fields, step) for step in range(bucket.num_steps)]

    def step(self, fields: dict[str, np.ndarray], step: int) -> list[int]:
        seeds = np.stack([fields["seed_low"], fields["seed_high"]], axis=1).view(np.uint64)[:, 0].tolist()
        slots, positions = fields["slots"].tolist(), fields["positions"].tolist()
        token_request, token_ids = fields["token_request"].tolist(), fields["token_ids"].tolist()
        num_steps = fields["num_steps"].tolist() if "num_steps" in fields else [1] * len(slots)
        drafts_end: dict[int, int] = {}  # for each request, the end of its first rejected draft token
        for token, position in enumerate(positions):
            request = token_request[token]
            if position >= 0 and step < num_steps[request]:
                token_id, slot = token_ids[token], slots[request]
                if step or token_id == ON_DEVICE:
                    token_id = int(self.last_tokens[slot])
                self.write(slot, position + step, token_id)
        sampled = [-1] * len(slots)
        for place, (token, end) in enumerate(zip(fields["last_index"], fields["sample_position"], strict=True)):
            owner = token_request[token]
            if not end or step >= num_steps[owner]:
                continue
            slot, end = slots[owner], int(end) + step
            assert end == positions[token] + step + 1 and seeds[place] == seeds[owner]
            is_draft = place != owner
            if is_draft and token_ids[token] != token_of(seeds[owner], end - 1):
                drafts_end[slot] = min(end, drafts_end.get(slot, end))
            sampled[place] = token_of(seeds[owner], end)
            if end >= drafts_end.get(slot, end + 1):
                sampled[place] = -end  # no model would sample this
                continue
            pages = self.page_table[slot, : -(-end // self.page_size)]
            found, expected = self.cache[pages].reshape(-1)[:end], self.expected[seeds[owner]][:end]
            assert np.array_equal(found, expected), (seeds[owner], end, np.flatnonzero(found != expected))
            if not is_draft:
                self.last_tokens[slot] = sampled[place]
        return sampled

    def write(self, slot: int, position: int, token_id: int) -> None:
        before = 0 if position == 0 else int(self.cache[self.place(slot, position - 1)])
        self.cache[self.place(slot, position)] = chained(before, token_id)

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return int(self.page_table[slot, position // self.page_size]), position % self.page_size


class Simulation:
    """An engine loop with steps in flight; every action ends with `audit()`, and a step takes a second."""

    def __init__(
        self, limits: SchedulerLimits, num_pages: int, num_steps_ahead: int = 1, copies: FakeCopies | None = None
    ):
        self.limits = limits
        self.num_steps_ahead = num_steps_ahead
        self.allocator = PageAllocator(num_pages)
        self.copies = copies
        self.host = HostCache(self.allocator, limits, copies) if copies is not None else None
        self.scheduler = Scheduler(limits, self.allocator, frozenset({EOS_TOKEN_ID}))
        self.device = FakeDevice(limits, num_pages)
        self.in_flight: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.accepted: list[Request] = []
        self.streamed: dict[Request, list[int]] = {}
        self.ended_outside: set[Request] = set()
        # By the identity of a plan in flight, how many samples count of some of its requests.
        self.num_valid: dict[int, dict[int, int]] = {}
        self.held_up: set[Request] = set()  # by drafts, when the last step was planned
        self.now = 0.0
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_cached_tokens = 0
        self.num_fetching_steps = 0  # in which a request computed while another waited for pages from host memory
        self.queue_seconds: list[float] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.arrival_seconds = self.now
            self.scheduler.prepare([request])
        self.scheduler.add(*requests)
        for request in requests:
            self.device.expect(request)
            self.accepted.append(request)
            self.streamed[request] = []
        self.scheduler.audit()

    def dispatch(self) -> StepPlan | None:
        unfinished = list(self.scheduler.requests)
        running = [request for request in unfinished if request.slot is not None]
        loads = {request.tenant: self._load(request.tenant) for request in running}
        num_pages = {request: len(request.pages) for request in running}
        self.now += 1.0
        for arrival in self.host.arrivals(self.now) if self.host is not None else ():
            self.scheduler.arrived(*arrival)
        self.scheduler.audit()
        self.scheduler.speculation.begin_plan()
        awaits = self.scheduler.speculation.awaits
        self.held_up = {request for request in running if request.num_drafts or awaits(request)}
        plan = self.scheduler.plan(self.now)
        if self.host is not None and self.copies is not None:
            for command in self.host.take_commands(self.now, plan):
                self.copies.run(command, self.device.cache)
        self.scheduler.audit()
        self.ended_outside.update(self.scheduler.take_expired())
        self._check_first(unfinished, plan)
        if plan is None:
            return None
        self._check_precedence(plan, running)
        self._check_shares(plan, loads, num_pages)
        self._check_budget(plan)
        self.num_steps += 1
        self.num_fetching_steps += any(request.is_fetching for request in self.scheduler.requests)
        self.num_prefill_tokens += plan.num_prefill_tokens
        self.num_cached_tokens += sum(admission.num_cached_pages for admission in plan.admitted) * self.limits.page_size
        self.queue_seconds += [seconds for *_, seconds in plan.admitted if seconds is not None]
        self.in_flight.append((plan, self.device.run(self.device.batches.build(plan))))
        return plan

    def _check_first(self, unfinished: list[Request], plan: StepPlan | None) -> None:
        """Checks that the highest-ranked request is in every step, unless it waits for tokens in flight.

        These are its own, or with drafts those of others.

        With several tenants this holds for the running ones that decode; `_check_shares` checks the others.
        """
        alive = [request for request in unfinished if not request.is_finished]
        if len({request.tenant for request in alive}) > 1:
            alive = [request for request in alive if request.slot is not None]
            first = min(alive, key=lambda request: request.rank, default=None)
            if first is None or first.num_computed_tokens < first.num_prefill_tokens:
                return
        if not alive:
            return
        first = min(alive, key=lambda request: request.rank)
        planned = {chunk.request for chunk in plan.chunks} if plan is not None else set()
        is_parked = first.is_blocked or first.is_fetching
        is_awaited = is_parked or (first.num_pending_tokens and (first.slot is None or first in self.held_up))
        is_awaited = is_awaited or (plan is None and bool(self.held_up))
        assert first in planned or is_awaited, first

    def _check_precedence(self, plan: StepPlan, running: list[Request]) -> None:
        """Checks that no running request waits without a reason, and none is preempted for a lower-ranked request."""
        planned = {chunk.request for chunk in plan.chunks}
        idle = [request for request in running if request not in planned and request.slot is not None]
        last = max((request for request in self.scheduler.requests if request.slot is not None), key=lambda r: r.rank)
        for request in idle:
            is_prefilling = request.num_computed_tokens < request.num_prefill_tokens
            is_stalled = request is last and not self.allocator.num_free_pages
            lacks_page = request.num_computed_tokens == request.num_page_positions and self._has_tenants()
            is_parked = request in self.held_up or request.is_blocked or request.is_fetching
            assert is_prefilling or is_stalled or lacks_page or is_parked, request
        for victim in plan.preempted:
            own = [request for request in planned if request.tenant == victim.tenant]
            assert victim.is_blocked or all(request.rank < victim.rank for request in own)
            assert victim.slot is None and victim.num_computed_tokens == 0

    def _has_tenants(self) -> bool:
        return len({request.tenant for request in self.scheduler.requests}) > 1

    def _load(self, tenant: str) -> float:
        """Returns the tenant's fraction of the slots or of the pages, whichever is larger.

        Each of its requests is granted one page more, which it may take in the next step.
        """
        running = [each for each in self.scheduler.requests if each.tenant == tenant and each.slot is not None]
        num_pages = sum(len(each.pages) + 1 for each in running)
        return max(len(running) / self.limits.max_running, num_pages / self.allocator.num_pages)

    def share(self, tenant: str) -> float:
        weights = {request.tenant: request.weight for request in self.scheduler.requests}
        return weights[tenant] / sum(weights.values())

    def _check_shares(self, plan: StepPlan, loads: dict[str, float], num_pages: dict[Request, int]) -> None:
        """Checks that no tenant within its share, and no tenant's first request, gave way to another tenant.

        The exception is the first of all: where every page is taken by requests within their shares, it takes the pages
        of the last of all, because otherwise no request could go on.
        """
        if not self._has_tenants():
            return
        running = [request for request in self.scheduler.requests if request.slot is not None]
        grown = {each for each in running if len(each.pages) > num_pages.get(each, 0)}
        first = min(num_pages, key=lambda request: request.rank, default=None)  # the first of those that ran before
        for tenant in {victim.tenant for victim in plan.preempted}:
            if first in grown:
                continue
            victims = [victim for victim in plan.preempted if victim.tenant == tenant]
            if any(each.tenant == tenant and each.rank < victims[-1].rank for each in grown):
                continue  # gave way to its own tenant
            assert loads[tenant] > self.share(tenant), (tenant, loads, victims)
            assert any(each.tenant == tenant for each in running), f"all requests of {tenant!r} gave way"

    def _check_budget(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.num_requests and plan.num_batch_tokens <= limits.max_step_tokens
        assert len({chunk.request for chunk in plan.chunks}) == plan.num_requests
        if plan.decodes and limits.max_prefill_tokens:
            assert plan.num_prefill_tokens <= limits.max_prefill_tokens
        assert plan.num_steps == 1 or not (plan.prefills or self.scheduler.num_waiting)

    def collect(self) -> list[Progress]:
        plan, sampled = self.in_flight.popleft()
        progress = []
        samples = [tokens[: plan.num_samples] for tokens in sampled]
        num_valid = self.num_valid.pop(id(plan), {})
        for step, tokens in enumerate(self.scheduler.speculation.accept(plan, samples, self.now, num_valid)):
            progress += self.scheduler.account(plan, tokens, self.now, step)
        if self.host is not None:
            self.host.collected(plan, self.now, self.now)
        for request, token_id in progress:
            if token_id is not None:
                self.streamed[request].append(token_id)
        self.scheduler.audit()
        return progress

    def finish(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if self.scheduler.finish(request, reason, self.now):
            self.ended_outside.add(request)
        self.scheduler.audit()

    def step(self) -> None:
        """Runs one iteration of the engine: dispatches a step, then collects the oldest if enough are in flight."""
        plan = self.dispatch()
        if self.in_flight and (plan is None or len(self.in_flight) > self.num_steps_ahead):
            self.collect()
        elif plan is None and self.host is not None and self.host.is_fetching:
            self.host.wait()
        elif plan is None and not any(request.is_blocked for request in self.scheduler.requests):
            assert not self.scheduler.has_work, "work is left, nothing is in flight, and nothing can be planned"

    def drain(self) -> None:
        """Runs to the end and checks every request's output."""
        # The highest-ranked request progresses by at least a token in every step, except while it waits for its tokens
        # in flight: at most once after a preemption and once at its end.
        bound = self.num_steps + sum(
            request.max_total_tokens + 2 * self.num_steps_ahead + 2 for request in self.scheduler.requests
        )
        # They take turns. None has requests left if only steps of cancelled ones are in flight.
        num_tenants = max(1, len({request.tenant for request in self.scheduler.requests}))
        while self.scheduler.has_work or self.in_flight:
            self.step()
            assert self.num_steps <= bound * num_tenants, "the simulation does not end"
        assert self.allocator.num_free_pages == self.allocator.num_pages
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for request in self.accepted:
            self._check_end(request)

    def _check_end(self, request: Request) -> None:
        assert request.is_finished and request.slot is None and not request.pages and not request.num_pending_tokens
        assert self.streamed[request] == request.output_token_ids
        tokens, reason = output_alone(request, self.limits.max_context)
        if request in self.ended_outside:
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
        else:
            assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
