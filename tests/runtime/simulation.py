"""A device without a model, and an engine loop that keeps steps in flight, to drive the scheduler through its life.

The device keeps, for each place in each page, whose key and value lie there. Each chunk must find there all positions
before its own, so a hole, a repeated or skipped position, a page in two hands or one handed on too early shows at once.
Tokens depend on (request seed, position) alone; hence so must the output of every request.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st

from meshserve.runtime.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.pages import PageAllocator
from meshserve.runtime.request import FinishReason, Request, SamplingParams
from meshserve.runtime.scheduler import Progress, Scheduler, SchedulerLimits, StepPlan

EOS_TOKEN_ID = 0
VOCAB_SIZE = 40  # hence one sampled token in 40 ends its request


def token_of(seed: int, position: int) -> int:
    """What the model samples for this position of the request with this seed."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EB % 2**64
    return (mixed >> 32) % VOCAB_SIZE


def make_limits(**changes: int) -> SchedulerLimits:
    values = dict(page_size=4, max_running=4, max_step_tokens=16, max_waiting=8, max_context=32)
    return SchedulerLimits(**(values | changes))


@st.composite
def tight_limits(draw: st.DrawFn) -> tuple[SchedulerLimits, int]:
    """Limits and a number of pages: from a cache that holds one request to one that holds many."""
    max_running = draw(st.integers(1, 6))
    page_size = draw(st.integers(1, 5))
    max_context = draw(st.integers(2, 24))
    limits = SchedulerLimits(
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=draw(st.integers(max_running, max_running + 12)),
        max_waiting=draw(st.integers(1, 12)),
        max_context=max_context,
    )
    needed_by_one = -(-(max_context - 1) // page_size)
    return limits, draw(st.integers(1, 3 * needed_by_one))


def make_request(
    seed: int, num_prompt_tokens: int = 3, max_tokens: int = 4, ignore_eos: bool = False, request_id: str = ""
) -> Request:
    return Request(
        request_id=request_id or f"r{seed}",
        prompt_token_ids=tuple(1 + (seed + i) % (VOCAB_SIZE - 1) for i in range(num_prompt_tokens)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        seed=seed,
    )


def output_alone(request: Request, max_context: int) -> tuple[list[int], FinishReason]:
    """What the request must give, in whatever company it is served."""
    num_prompt_tokens = len(request.prompt_token_ids)
    tokens: list[int] = []
    for position in range(num_prompt_tokens, min(num_prompt_tokens + request.params.max_tokens, max_context)):
        token_id = token_of(request.seed, position)
        if token_id == EOS_TOKEN_ID and not request.params.ignore_eos:
            return tokens, FinishReason.STOP
        tokens.append(token_id)
    return tokens, FinishReason.LENGTH


@dataclass
class FakeDevice:
    """Runs steps at once and in order; the host chooses when to look at the tokens."""

    page_size: int
    max_step_tokens: int
    cache: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)  # place -> seed, position, token
    last_token: dict[int, int] = field(default_factory=dict)  # by row

    def run(self, plan: StepPlan) -> list[int]:
        """The token sampled for each chunk; nonsense where the chunk does not sample."""
        assert plan.chunks and plan.num_tokens <= self.max_step_tokens
        assert len({chunk.request for chunk in plan.chunks}) == len(plan.chunks)
        is_decode = [chunk.num_tokens == 1 for chunk in plan.chunks]
        assert is_decode == sorted(is_decode, reverse=True), "one-token chunks come first"
        sampled = []
        for request, start, num_tokens, is_sampling in plan.chunks:
            end = start + num_tokens
            assert num_tokens >= 1 and request.row is not None
            assert len(request.pages) * self.page_size >= end > (len(request.pages) - 1) * self.page_size
            for position in range(start, end):
                is_known = position < request.num_known_tokens
                token_id = request.token_at(position) if is_known else self.last_token[request.row]
                self.cache[self._place(request, position)] = (request.seed, position, token_id)
            self._check_cache(request, end)
            sampled.append(token_of(request.seed, end) if is_sampling else -1)
            if is_sampling:
                self.last_token[request.row] = sampled[-1]
        return sampled

    def _place(self, request: Request, position: int) -> tuple[int, int]:
        return request.pages[position // self.page_size], position % self.page_size

    def _check_cache(self, request: Request, num_tokens: int) -> None:
        for position in range(num_tokens):
            is_prompt = position < len(request.prompt_token_ids)
            token_id = request.prompt_token_ids[position] if is_prompt else token_of(request.seed, position)
            found = self.cache.get(self._place(request, position))
            assert found == (request.seed, position, token_id), (request.request_id, position, found, token_id)


class Simulation:
    """An engine loop with steps in flight; every action ends with `audit()`."""

    def __init__(self, limits: SchedulerLimits, num_pages: int, num_steps_ahead: int = 1):
        self.limits = limits
        self.num_steps_ahead = num_steps_ahead
        self.allocator = PageAllocator(num_pages)
        self.scheduler = Scheduler(limits, self.allocator, frozenset({EOS_TOKEN_ID}))
        self.device = FakeDevice(limits.page_size, limits.max_step_tokens)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.accepted: list[Request] = []
        self.streamed: dict[Request, list[int]] = {}
        self.ended_outside: set[Request] = set()
        self.num_steps = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.accepted.append(request)
        self.streamed[request] = []
        self.scheduler.audit()

    def dispatch(self) -> StepPlan | None:
        running = [request for request in self.accepted if request.row is not None]
        oldest = next((request for request in self.accepted if not request.is_finished), None)
        is_held_up = oldest is None or self._has_all_in_flight(oldest)
        is_held_up = is_held_up or (oldest.row is None and oldest.num_pending_tokens > 0)
        plan = self.scheduler.plan()
        self.scheduler.audit()
        assert is_held_up or (plan is not None and oldest in {chunk.request for chunk in plan.chunks})
        if plan is None:
            return None
        self._check_precedence(plan, running)
        self.num_steps += 1
        self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def _check_precedence(self, plan: StepPlan, running: list[Request]) -> None:
        """No running request waits for a prefill or an admission, and nobody gives way to a newer request."""
        arrival = {request: index for index, request in enumerate(self.accepted)}
        planned = {chunk.request for chunk in plan.chunks}
        for request in running:
            is_idle = self._has_all_in_flight(request)
            assert request in planned or request in plan.preempted or is_idle, request.request_id
        for victim in plan.preempted:
            assert all(arrival[request] < arrival[victim] for request in planned)
            assert victim.row is None and victim.num_computed_tokens == 0

    def _has_all_in_flight(self, request: Request) -> bool:
        return request.num_tokens == self.max_total_tokens(request)

    def max_total_tokens(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.limits.max_context)

    def collect(self) -> list[Progress]:
        plan, sampled = self.in_flight.popleft()
        progress = self.scheduler.account(plan, sampled)
        for request, token_id in progress:
            if token_id is not None:
                self.streamed[request].append(token_id)
        self.scheduler.audit()
        return progress

    def finish(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if self.scheduler.finish(request, reason):
            self.ended_outside.add(request)
        self.scheduler.audit()

    def step(self) -> None:
        """One turn of the engine: dispatch a step, then collect the oldest if enough are in flight."""
        plan = self.dispatch()
        if self.in_flight and (plan is None or len(self.in_flight) > self.num_steps_ahead):
            self.collect()
        elif plan is None:
            assert not self.scheduler.has_work, "work is left, nothing is in flight, and nothing can be planned"

    def drain(self) -> None:
        """Runs to the end and checks what everyone got."""
        # The oldest request gets a token's worth of work in every step, but for those in which it waits for its tokens
        # in flight: at most once after a preemption and once at its end.
        bound = sum(self.max_total_tokens(request) + 2 * self.num_steps_ahead + 2 for request in self.accepted)
        while self.scheduler.has_work or self.in_flight:
            self.step()
            assert self.num_steps <= bound, "no end in sight"
        assert self.allocator.num_free_pages == self.allocator.num_pages
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for request in self.accepted:
            self._check_end(request)

    def _check_end(self, request: Request) -> None:
        assert request.is_finished and request.row is None and not request.pages and not request.num_pending_tokens
        assert self.streamed[request] == request.output_token_ids
        tokens, reason = output_alone(request, self.limits.max_context)
        if request in self.ended_outside:
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
        else:
            assert (request.output_token_ids, request.finish_reason) == (tokens, reason)


def run_load(rng: random.Random, simulation: Simulation, num_requests: int, arrivals_per_step: float) -> None:
    """Offers requests at random while stepping; one in ten is cancelled at some later moment."""
    limits, doomed = simulation.limits, []
    for seed in range(1, num_requests + 1):
        request = make_request(
            seed, rng.randint(1, limits.max_context // 2), rng.randint(1, limits.max_context), rng.random() < 0.5
        )
        try:
            simulation.add(request)
        except (InvalidRequestError, QueueFullError):
            continue
        if rng.random() < 0.1:
            doomed.append(request)
        while rng.random() > arrivals_per_step / (1 + arrivals_per_step):
            simulation.step()
            if doomed and rng.random() < 0.1:
                simulation.finish(doomed.pop(rng.randrange(len(doomed))))
    simulation.drain()
