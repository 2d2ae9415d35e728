"""Packed steps of a real scheduler, taken apart again field by field."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.api.sampling_params import SamplingMode, SamplingParams
from meshserve.runtime.program.batch import ANY_MODE, ON_DEVICE, BatchBuilder, Bucket, StepBatch
from meshserve.runtime.program.processors.processor_batch import SAMPLES, ProcessorBatchBuilder, ProcessorShape
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import ScheduledChunk, StepPlan
from tests.runtime.simulation import make_request, tight_limits

LIMITS = SchedulerLimits(page_size=4, max_running=3, max_step_tokens=16, max_waiting=8, max_context=64)


class Loop:
    """A scheduler, and a builder whose every step is decoded into plain lists."""

    def __init__(self, limits: SchedulerLimits = LIMITS, num_pages: int = 32):
        self.limits = limits
        self.scheduler = Scheduler(limits, PageAllocator(num_pages), frozenset())
        sizes = {name: getattr(limits, name) for name in ("max_running", "page_size")}
        self.buckets = declare_buckets(
            max_step_tokens=limits.max_step_tokens, max_decode_steps=limits.max_decode_steps, **sizes
        )
        processors = ProcessorBatchBuilder(max_running=limits.max_running, vocab_size=1000, eos_token_ids=frozenset())
        self.builder = BatchBuilder(self.buckets, **sizes, max_request_pages=16, processors=processors)
        self.page_rows: list[list[int]] = []  # the last step's
        self.plan: StepPlan | None = None

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> tuple[Bucket, dict[str, np.ndarray]]:
        """The next step: its bucket and fields."""
        self.plan = self.scheduler.plan(0.0)
        assert self.plan is not None
        bucket, packed, page_rows, self.processors = self.build(self.plan)
        self.page_rows = [page_row.tolist() for page_row in page_rows]
        assert packed.dtype == np.int32 and packed.shape == (bucket.size,)
        return bucket, {name: packed[place] for name, place in bucket.fields.items()}

    def build(self, plan: StepPlan) -> StepBatch:
        """Packs a plan, and checks that what is kept of the last one makes no difference."""
        batch = self.builder.build(plan)
        layouts, self.builder._layouts = self.builder._layouts, {}
        assert np.array_equal(self.builder.build(plan).packed, batch.packed), "the last step's layout does not fit"
        self.builder._layouts = layouts
        return batch

    def account(self, plan: StepPlan, *tokens: int) -> None:
        for step in range(plan.num_steps):
            self.scheduler.account(plan, tokens, 0.0, step)


def no_processors(max_running: int = 64) -> ProcessorBatchBuilder:
    return ProcessorBatchBuilder(max_running=max_running, vocab_size=1000, eos_token_ids=frozenset())


def new_pages(fields: dict[str, np.ndarray], max_running: int = 3) -> list[tuple[int, int, int]]:
    """(row, index, page), without the padding."""
    entries = zip(*(fields[name].tolist() for name in ("page_slot", "page_index", "page")), strict=True)
    return [entry for entry in entries if entry[0] != max_running]


def test_the_fields_fill_the_vector_without_overlap():
    bucket = Bucket(num_tokens=8, num_requests=3, num_new_pages=5)
    places = list(bucket.fields.values())
    assert [places[0].start, *(place.stop for place in places)] == [
        0,
        *(place.start for place in places[1:]),
        bucket.size,
    ]
    assert bucket.size == 3 * 8 + 9 * 3 + 3 * 5 + 2


def test_prefill_and_decode_share_a_step():
    loop = Loop()
    first, second = make_request(1, num_prompt_tokens=2), make_request(2, num_prompt_tokens=6)
    loop.add(first)
    loop.step()
    loop.account(loop.plan, 30)
    loop.add(second)
    bucket, fields = loop.step()
    assert bucket == Bucket(8, 3, 5)
    # The decode first, of the token that the device sampled for position 2. Then the second one's whole prompt.
    assert fields["token_ids"].tolist() == [ON_DEVICE, *second.prompt_token_ids, 0]
    assert fields["positions"].tolist() == [2, 0, 1, 2, 3, 4, 5, -1]
    assert fields["token_request"].tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    assert fields["slots"].tolist() == [first.slot, second.slot, 3]  # 3 is no row: writes there are dropped
    assert fields["last_index"][:2].tolist() == [0, 6]
    assert fields["sample_position"][:2].tolist() == [3, 6]


def test_a_token_sampled_in_the_row_is_left_to_the_device():
    loop = Loop()
    request = make_request(1, num_prompt_tokens=3)
    loop.add(request)
    _, fields = loop.step()
    prefill = loop.plan
    assert fields["token_ids"].tolist() == list(request.prompt_token_ids)
    for position in (3, 4):  # nothing is accounted in between
        bucket, fields = loop.step()
        assert bucket.num_tokens == 1
        assert (fields["token_ids"].tolist(), fields["positions"].tolist()) == ([ON_DEVICE], [position])
    loop.account(prefill, 7)
    _, fields = loop.step()
    assert fields["token_ids"].tolist() == [ON_DEVICE]


def test_a_chunk_ends_before_or_with_the_prompt():
    """A prompt of 20 tokens under a budget of 16; only the second chunk samples for it."""
    loop = Loop()
    request = make_request(1, num_prompt_tokens=20)
    loop.add(request)
    _, fields = loop.step()
    assert fields["token_ids"].tolist() == list(request.prompt_token_ids[:16])
    _, fields = loop.step()
    assert fields["token_ids"].tolist() == list(request.prompt_token_ids[16:])
    assert fields["positions"].tolist() == [16, 17, 18, 19]
    assert fields["last_index"][0] == 3
    assert fields["sample_position"][0] == 20


def test_every_page_is_announced_once_when_it_begins():
    loop = Loop()
    request = make_request(1, num_prompt_tokens=20, max_tokens=40, ignore_eos=True)
    loop.add(request)
    announced = []
    for _ in range(14):
        _, fields = loop.step()
        announced += new_pages(fields)
        num_begun = -(-request.num_computed_tokens // LIMITS.page_size)
        assert [page for _, _, page in announced] == request.pages[:num_begun]
    assert announced == [(request.slot, index, page) for index, page in enumerate(request.pages)]
    assert len(announced) == 8  # 20 + 12 positions in pages of 4


def test_cached_pages_come_as_a_row_of_their_own():
    """More of them than a step of one token has room for."""
    loop = Loop()
    first, second = (make_request(seed, prompt=tuple(range(1, 18))) for seed in (1, 2))
    loop.add(first)
    loop.step()
    loop.step()
    loop.add(second)
    bucket, fields = loop.step()
    assert loop.page_rows == [[second.slot, *first.pages[:4], *[0] * 12]]
    assert new_pages(fields) == [(second.slot, 4, second.pages[4])]
    assert (bucket.num_tokens, fields["token_ids"].tolist()) == (2, [ON_DEVICE, 17])


def test_a_window_carries_the_steps_of_each_request():
    loop = Loop(dataclasses.replace(LIMITS, max_decode_steps=4))
    loop.add(make_request(1, 3, 9), make_request(2, 5, 3))
    loop.step()
    bucket, fields = loop.step()
    assert bucket == Bucket(2, 2, 2, 4)
    assert (fields["positions"].tolist(), fields["num_steps"].tolist()) == ([3, 5], [4, 2])
    assert [(row, index) for row, index, _ in new_pages(fields)] == [(0, 1)]  # position 4 begins a page


def test_a_preempted_request_gets_all_its_pages_announced_anew():
    loop = Loop(num_pages=5)
    older, newer = (make_request(seed, num_prompt_tokens=4, max_tokens=12, ignore_eos=True) for seed in (1, 2))
    loop.add(older, newer)
    tables: dict[int, dict[int, int]] = {row: {} for row in range(LIMITS.max_running)}
    while loop.scheduler.has_work:
        _, fields = loop.step()
        for row, *pages in loop.page_rows:
            tables[row] = dict(enumerate(pages))
        for row, index, page in new_pages(fields):
            tables[row][index] = page
        for request, start, num_tokens, _ in loop.plan.chunks:
            num_pages = -(-(start + num_tokens) // LIMITS.page_size)
            assert [tables[request.slot][index] for index in range(num_pages)] == request.pages[:num_pages]
        loop.account(loop.plan, *[9] * len(loop.plan.chunks))
    assert loop.scheduler.num_preemptions > 0


def test_sampling_parameters_survive_their_passage_as_bits():
    loop = Loop()
    params = SamplingParams(temperature=0.7, top_p=0.91, top_k=40)
    greedy = SamplingParams(temperature=0.0, top_k=2**40)
    seeds = (0xFEDCBA9876543210 >> 1, 3)
    requests = [
        dataclasses.replace(make_request(index), params=each, seed=seed)
        for index, (each, seed) in enumerate(zip((params, greedy), seeds, strict=True))
    ]
    loop.add(*requests)
    _, fields = loop.step()
    assert fields["temperature"].view(np.float32)[:2].tolist() == [np.float32(0.7), 0.0]
    assert fields["top_p"].view(np.float32)[:2].tolist() == [np.float32(0.91), 1.0]
    assert fields["top_k"][:2].tolist() == [40, 2**31 - 1]
    low, high = (fields[name].view(np.uint32)[:2].astype(object) for name in ("seed_low", "seed_high"))
    assert (low + high * 2**32).tolist() == list(seeds)


# --- buckets


def test_buckets_are_few_and_end_with_the_limits():
    buckets = declare_buckets(max_step_tokens=512, max_running=64, page_size=32)
    assert [bucket.num_tokens for bucket in buckets] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [bucket.num_requests for bucket in buckets] == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]
    odd = declare_buckets(max_step_tokens=100, max_running=24, page_size=32)
    assert [bucket.num_tokens for bucket in odd] == [1, 2, 4, 8, 16, 24, 32, 64, 100]


@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("has_mode_programs", [False, True])
@pytest.mark.parametrize(("max_step_tokens", "max_running"), [(512, 64), (100, 24), (48, 48), (256, 256), (16, 3)])
def test_with_decode_kernels_steps_with_prefill_have_no_small_shapes(
    max_step_tokens, max_running, has_mode_programs, max_decode_steps
):
    limits = {"max_step_tokens": max_step_tokens, "max_running": max_running, "page_size": 32}
    buckets = declare_buckets(
        **limits, max_decode_steps=max_decode_steps, max_fused_tokens=64, has_mode_programs=has_mode_programs
    )
    mixed = [bucket for bucket in buckets if not bucket.is_decode]
    assert min(bucket.num_tokens for bucket in mixed) == min(64, max_step_tokens)
    builder = BatchBuilder(
        buckets, max_running=max_running, page_size=32, max_request_pages=4, processors=no_processors()
    )
    chunk = ScheduledChunk(make_request(1), 0, 1, True)
    for num_tokens in range(1, max_step_tokens + 1):
        num_decodes = min(num_tokens, max_running) - 1
        prefill = chunk._replace(num_tokens=num_tokens - num_decodes)
        bucket = builder.bucket(step_plan([make_request(1)] * num_decodes, [prefill], 1), SamplingMode.GREEDY)
        assert not bucket.is_decode and bucket.num_tokens >= num_tokens and bucket.num_requests >= num_decodes + 1
        assert bucket.num_tokens < max(2 * num_tokens, 65), "padded beyond need"
    for num_decodes in range(1, max_running + 1):
        for num_steps in {1, max_decode_steps}:
            for mode in SamplingMode:
                bucket = builder.bucket(step_plan([make_request(1)] * num_decodes, [], num_steps), mode)
                assert bucket.num_steps == num_steps and bucket.num_tokens < 2 * num_decodes
                assert bucket.is_decode
                assert bucket.mode == (mode if bucket.num_tokens <= 64 or has_mode_programs else ANY_MODE)


def test_decodes_that_are_not_fused_have_sizes_between_the_powers_of_two():
    def sizes(*, has_decode_kernels: bool, max_running: int = 512) -> list[int]:
        limits = {"max_step_tokens": 1024, "max_running": max_running, "page_size": 32}
        buckets = declare_buckets(**limits, max_fused_tokens=64 if has_decode_kernels else 0)
        return [bucket.num_tokens for bucket in buckets if not bucket.is_decode]

    assert sizes(has_decode_kernels=True) == [64, 96, 128, 192, 256, 384, 512, 1024]
    assert sizes(has_decode_kernels=True, max_running=300) == [64, 96, 128, 192, 256, 300, 512, 1024]
    assert sizes(has_decode_kernels=False) == [2**power for power in range(11)]


def step_plan(decodes: list[Request], prefills: list[ScheduledChunk], num_steps: int) -> StepPlan:
    return StepPlan(
        decodes=decodes, starts=[1] * len(decodes), prefills=prefills, num_steps=num_steps,
        decode_lengths=[num_steps] * len(decodes) if num_steps > 1 else [], admitted=[], preempted=[],
    )  # fmt: skip


@pytest.mark.parametrize("num_decodes", [1, 2, 3])
def test_decodes_alone_waste_no_room(num_decodes: int):
    loop = Loop()
    loop.add(*(make_request(seed) for seed in range(1, num_decodes + 1)))
    loop.step()  # their prompts
    assert loop.step()[0] == Bucket(num_decodes, num_decodes, num_decodes)


def test_a_plan_beyond_every_bucket_is_our_own_fault():
    loop = Loop()
    loop.add(make_request(1, num_prompt_tokens=10))
    small = BatchBuilder(
        loop.buckets[:2],
        max_running=3,
        page_size=4,
        max_request_pages=16,
        processors=ProcessorBatchBuilder(max_running=3, vocab_size=1000, eos_token_ids=frozenset()),
    )
    with pytest.raises(AssertionError, match="no bucket holds 10 tokens, 1 samples and 0 adapters"):
        small.build(loop.scheduler.plan(0.0))


@given(tight_limits(), st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12))
def test_every_plan_fits_its_bucket(limits_and_pages: tuple[SchedulerLimits, int], lengths: list[tuple[int, int]]):
    """Tokens, requests and new pages, whatever the scheduler plans, with a step in flight and preemptions."""
    limits, num_pages = limits_and_pages
    loop = Loop(dataclasses.replace(limits, max_waiting=len(lengths)), num_pages)
    for seed, (num_prompt_tokens, max_tokens) in enumerate(lengths, start=1):
        with contextlib.suppress(InvalidRequestError):  # too long for these limits
            loop.add(make_request(seed, num_prompt_tokens, max_tokens, ignore_eos=True))
    in_flight: list[StepPlan] = []
    while loop.scheduler.has_work:
        plan = loop.scheduler.plan(0.0)
        if plan is not None:
            bucket, packed, *_ = loop.build(plan)  # raises if a field is too short
            fields = {name: packed[place] for name, place in bucket.fields.items()}
            assert bucket in loop.buckets and bucket.num_requests >= len(plan.chunks)
            assert (fields["positions"] >= 0).sum() == plan.num_batch_tokens
            num_begun = sum(
                position % limits.page_size == 0
                for chunk in plan.chunks
                for position in range(chunk.start, chunk.start + chunk.num_tokens)
            )
            assert len(new_pages(fields, limits.max_running)) == num_begun <= bucket.num_new_pages
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            done = in_flight.pop(0)
            loop.account(done, *[9] * len(done.chunks))


def test_a_row_forgets_what_its_last_holder_wanted():
    """A step with one controlled request samples all of them under controls."""
    loop = Loop()
    holder, newcomer, other = (make_request(seed, max_tokens=9) for seed in (1, 2, 3))
    holder.params = dataclasses.replace(holder.params, bad_token_ids=(1,), min_tokens=5, logprobs=1)
    other.params = dataclasses.replace(other.params, logprobs=1)
    loop.add(holder)
    loop.step()
    loop.scheduler.finish(holder, FinishReason.CANCELLED, 0.0)
    loop.add(newcomer, other)
    loop.step()
    assert [request.slot for request in loop.plan.requests] == [0, 1]
    packed = loop.processors.packed
    shape = next(shape for size in range(1, 4) if (shape := ProcessorShape(size)).size == len(packed))
    assert packed[shape.fields["flags"]].tolist()[:2] == [SAMPLES, SAMPLES]
