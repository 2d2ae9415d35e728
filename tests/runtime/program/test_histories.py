"""Whole lives under random load, on a device that sees each misplaced token."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from meshserve.runtime.api.errors import InvalidRequestError, QueueFullError
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.scheduler.limits import SchedulerLimits
from tests.runtime.simulation import Simulation, make_limits, make_request, output_alone, tight_limits

WEIGHTS = {"": 1.0, "a": 1.0, "b": 3.0}  # tenants' weights
STEM = tuple(1 + index % 7 for index in range(24))  # prompts that begin with it share pages


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, dispatches, collections and endings, with up to two steps in flight."""

    requests: Bundle[Request] = Bundle("requests")
    num_requests = 0

    @initialize(limits_and_pages=tight_limits())
    def build(self, limits_and_pages: tuple[SchedulerLimits, int]) -> None:
        self.simulation = Simulation(*limits_and_pages, num_steps_ahead=2)

    @rule(
        target=requests,
        num_stem_tokens=st.integers(0, 24),
        num_own_tokens=st.integers(0, 5),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -1, 5]),
        cache_salt=st.sampled_from(["", "", "other"]),
        tenant=st.sampled_from(["", "", "", "a", "b"]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        timeout_seconds=st.none() | st.integers(0, 30),
    )
    def add(self, num_stem_tokens, num_own_tokens, max_tokens, n, timeout_seconds, tenant, **fields):
        first = self.num_requests + 1
        self.num_requests += n
        own = tuple(1 + (first + index) % 39 for index in range(num_own_tokens))
        deadline = float("inf") if timeout_seconds is None else self.simulation.now + timeout_seconds
        samples = [
            make_request(
                seed,
                max_tokens=max_tokens,
                prompt=STEM[:num_stem_tokens] + own,
                deadline_seconds=deadline,
                tenant=tenant,
                weight=WEIGHTS[tenant],
                **fields,
            )
            for seed in range(first, first + n)
        ]
        try:
            self.simulation.add(*samples)
        except (InvalidRequestError, QueueFullError):
            assert not set(samples) & set(self.simulation.scheduler.requests)
        return multiple(*samples)

    @rule(target=requests, before=requests, max_tokens=st.integers(1, 9))
    def follow_up(self, before: Request, max_tokens: int):
        """A turn of a conversation: what was said before, the output included, and a token more."""
        self.num_requests += 1
        prompt = (*before.tokens(0, before.num_known_tokens), 1)
        fields = {name: getattr(before, name) for name in ("cache_salt", "tenant", "weight")}
        request = make_request(self.num_requests, max_tokens=max_tokens, prompt=prompt, **fields)
        try:
            self.simulation.add(request)
        except (InvalidRequestError, QueueFullError):
            pass
        return request

    @precondition(lambda self: len(self.simulation.in_flight) < 2)
    @rule()
    def dispatch(self) -> None:
        self.simulation.dispatch()

    @precondition(lambda self: self.simulation.in_flight)
    @rule()
    def collect(self) -> None:
        self.simulation.collect()

    @rule(request=requests, reason=st.sampled_from(FinishReason))
    def finish(self, request: Request, reason: FinishReason) -> None:
        if request in self.simulation.streamed:
            self.simulation.finish(request, reason)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.scheduler.audit()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60)
TestAnyHistory = SchedulerMachine.TestCase


def run_load(
    rng: random.Random, simulation: Simulation, num_requests: int, arrivals_per_step: float, num_tenants: int = 1
) -> None:
    """Offers requests at random while stepping; one in ten is cancelled at some later moment."""
    limits, doomed = simulation.limits, []
    for seed in range(1, num_requests + 1):
        prompt = STEM[: rng.randint(0, 24)] + tuple(rng.randint(1, 39) for _ in range(rng.randint(1, 6)))
        tenant = rng.choice(sorted(WEIGHTS)[:num_tenants])
        request = make_request(
            seed,
            tenant=tenant,
            weight=WEIGHTS[tenant],
            max_tokens=rng.randint(1, limits.max_context),
            ignore_eos=rng.random() < 0.5,
            prompt=prompt[: max(limits.max_context // 2, 1)],
            priority=rng.choice((0, 0, 1, -1)),
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


@given(
    st.randoms(use_true_random=False),
    tight_limits(),
    st.sampled_from([0.05, 0.3, 3.0]),
    st.integers(0, 2),
    st.integers(1, len(WEIGHTS)),
)
@settings(max_examples=100)
def test_any_load_ends_with_everyone_served(
    rng, limits_and_pages, arrivals_per_step: float, num_steps_ahead: int, num_tenants: int
):
    simulation = Simulation(*limits_and_pages, num_steps_ahead=num_steps_ahead)
    run_load(rng, simulation, 25, arrivals_per_step, num_tenants)


@pytest.mark.parametrize("num_tenants", [1, 3])
@pytest.mark.parametrize(
    ("num_pages", "is_crowded"), [(12, True), (30, True), (400, False)], ids=["one fits", "few fit", "all fit"]
)
def test_a_long_load(num_pages: int, is_crowded: bool, num_tenants: int):
    limits = make_limits(
        page_size=8, max_running=16, max_step_tokens=48, max_waiting=1000, max_context=96, priority_seconds=0.0
    )
    simulation = Simulation(limits, num_pages)
    run_load(random.Random(num_pages), simulation, 250, 0.3, num_tenants)
    assert len(simulation.accepted) == 250
    if num_tenants == 1:  # several also preempt for their shares of the slots
        assert (simulation.scheduler.num_preemptions > 0) == is_crowded


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_company_and_order_of_arrival_do_not_change_the_output(has_prefix_cache: bool):
    limits = make_limits(max_waiting=50, has_prefix_cache=has_prefix_cache)
    outputs = []
    for num_pages, order in [(8, 1), (9, -1), (100, 1)]:
        simulation = Simulation(limits, num_pages)
        requests = [make_request(seed, 1 + seed % 11, 1 + seed % 17) for seed in range(1, 30)]
        for request in requests[::order]:
            simulation.add(request)
        simulation.drain()
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0] == [output_alone(request, limits.max_context)[0] for request in requests]
