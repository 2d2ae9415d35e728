"""Tests which adapters are on the devices: every running request's is, and none waits for ever."""

import random
from collections.abc import Mapping

import pytest

from meshserve.runtime.api.adapters import AdapterInfo
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.scheduler.adapter_slots import AdapterSlots
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan
from tests.runtime.simulation import make_limits


def adapter(number: int) -> AdapterInfo:
    return AdapterInfo(
        name=f"a{number}",
        path="",
        digest=f"{number:064x}",
        rank=1,
        targets=("q_proj",),
        num_bytes=1,
        is_on_device=False,
    )


def request(number: int, index: int, *, max_tokens: int = 3, **fields: float) -> Request:
    """Returns a request with an adapter; without one if `number` is negative."""
    of_adapter = {}
    if number >= 0:
        info = adapter(number)
        of_adapter = {"adapter": info.name, "adapter_digest": info.digest, "adapter_info": info}
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=(index % 7, *range(1, 5)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=index,
        **of_adapter,
        **fields,
    )


class Devices:
    """A scheduler, and what its plans put on the devices."""

    def __init__(self, num_slots: int, num_pages: int = 40, **limits: int):
        self.slots, self.pages = AdapterSlots(num_slots), PageAllocator(num_pages)
        self.scheduler = Scheduler(
            make_limits(**{"max_running": 8, "max_waiting": 2000, **limits}), self.pages, frozenset(), self.slots
        )
        self.held: dict[int, str] = {}  # digests, by slot
        self.of_request: dict[Request, int | None] = {}
        self.now = 0.0
        self.order: list[Request] = []  # of first admission

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.prepare([each])
            self.scheduler.add(each)

    def step(self) -> StepPlan | None:
        """Runs a step, in which every token comes from the adapter of its request."""
        self.now += 1
        plan = self.scheduler.plan(self.now)
        for slot, info in self.slots.take_loads():
            self.held[slot] = info.digest
        self.scheduler.audit()
        if plan is None:
            return None
        for each in plan.admitted:
            self.of_request[each.request] = each.request.adapter_slot
            if each.request not in self.order:
                self.order.append(each.request)
        for each in plan.requests:
            slot = self.of_request[each]
            assert (slot is None) == (not each.adapter_digest)
            assert slot is None or self.held[slot] == each.adapter_digest, (
                f"{each.request_id} runs with another adapter"
            )
        self.scheduler.account(plan, [1] * plan.num_requests, self.now)
        self.scheduler.audit()
        return plan

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("a request never ends")


def test_the_least_recently_used_adapter_leaves_first():
    devices = Devices(2)
    for index, number in enumerate([0, 1, 0, 2, 0, 1, 2]):
        devices.add(request(number, index))
        devices.finish()
    assert devices.slots.num_loads == 5, "0, 1, 2 in place of 1, 1 in place of 2, 2 in place of 0"
    assert [devices.slots.holds(adapter(number).digest) for number in (0, 1, 2)] == [False, True, True]
    devices.slots.reset()
    assert not any(devices.slots.holds(adapter(number).digest) for number in (0, 1, 2))
    devices.add(request(1, 10))
    devices.finish()
    assert devices.slots.num_loads == 6


def test_a_request_that_lacks_a_slot_lets_others_pass():
    devices = Devices(1)
    requests = [request(number, index, max_tokens=9) for index, number in enumerate([0, 1, -1, -1])]
    devices.add(*requests)
    devices.step()
    assert devices.order == [requests[0], requests[2], requests[3]] and devices.scheduler.num_waiting == 1
    devices.finish()
    assert devices.order[-1] is requests[1]


def test_a_stream_of_requests_does_not_keep_another_adapter_out():
    devices = Devices(1)
    first = request(0, 0)
    devices.add(first)
    devices.step()
    late = request(1, 1, arrival_seconds=devices.now)
    devices.add(late)
    for index in range(2, 200):
        devices.add(request(0, index, arrival_seconds=devices.now))
        devices.step()
        if late.is_finished:
            break
    assert late.is_finished and index < 20, "it runs as soon as those before it have ended"
    devices.finish()


def test_a_waiting_request_can_be_cancelled_and_expires():
    devices = Devices(1)
    requests = [request(0, 0, max_tokens=12), request(1, 1), request(1, 2, deadline_seconds=4.0)]
    for each in requests:
        devices.add(each)
    devices.step()
    assert devices.scheduler.num_waiting == 2
    devices.scheduler.finish(requests[1], FinishReason.CANCELLED, devices.now)
    devices.scheduler.audit()
    devices.finish()
    assert devices.scheduler.take_expired() == [requests[2]] and not devices.scheduler.num_waiting


@pytest.mark.parametrize(("num_slots", "num_pages"), [(8, 40), (8, 9), (1, 9), (3, 12)])
def test_random_requests_over_forty_adapters(num_slots: int, num_pages: int):
    """With few pages, requests are preempted and come back. Nothing is lost, and slots are never someone else's."""
    draw, devices = random.Random(num_slots * 100 + num_pages), Devices(num_slots, num_pages)
    for index in range(300):
        number = min(int(draw.expovariate(0.1)), 39) if draw.random() < 0.9 else -1
        fields = {"priority": draw.choice([0, 0, 0, 3]), "arrival_seconds": devices.now}
        devices.add(request(number, index, max_tokens=draw.randint(1, 9), **fields))
        for _ in range(draw.choice([0, 0, 1, 4])):
            devices.step()
    devices.finish()
    assert len(devices.order) == 300 and devices.scheduler.num_running == devices.scheduler.num_waiting == 0
    assert devices.slots.num_available == num_slots
    firsts: Mapping[str, int] = {each.request_id: len(each.output_token_ids) for each in devices.order}
    assert all(firsts[each.request_id] == each.params.max_tokens for each in devices.order)
    if (num_slots, num_pages) == (8, 9):
        assert devices.scheduler.num_preemptions
