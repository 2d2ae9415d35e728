"""The sampling fields beyond temperature, top-k and top-p on the host: checked, carried, and packed for the device."""

import dataclasses
import math

import numpy as np
import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api import proto_codec
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.request import FinishReason, Output, Request, TokenLogprobs
from meshserve.runtime.api.sampling_params import SamplingMode, SamplingParams, Stage, params_at
from meshserve.runtime.client import messages, resume
from meshserve.runtime.program.batch import BatchBuilder
from meshserve.runtime.program.processors.contract import COUNT, ENDS, IN_PROMPT
from meshserve.runtime.program.processors.processor_batch import (
    ADJUSTS,
    SAMPLES,
    ProcessorBatch,
    ProcessorBatchBuilder,
    ProcessorShape,
)
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.scheduler.page_allocator import PageAllocator
from meshserve.runtime.scheduler.scheduler import Scheduler
from meshserve.runtime.scheduler.step_plan import StepPlan
from meshserve.runtime.server.output_queue import join
from tests.runtime.loopback import INFO, VOCAB_SIZE

END = 5
EVERY_FIELD = {
    "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -1.5, "repetition_penalty": 1.25,
    "logit_bias": {3: -2.0, 7: 4.5}, "allowed_token_ids": (3, 4, 7), "bad_token_ids": (4,), "min_tokens": 2,
    "logprobs": 0, "prompt_logprobs": 20, "processed_logprobs": True,
}  # fmt: skip


# --- ranges


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan), ("frequency_penalty", 2.1), ("presence_penalty", -2.1),
        ("presence_penalty", math.nan), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan), ("logit_bias", {1: 100.5}), ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -math.inf}), ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", tuple(range(1025))), ("bad_token_ids", tuple(range(1025))),
        ("logprobs", 21), ("logprobs", -1), ("prompt_logprobs", 21),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field: str, value: object):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == f"sampling.{field}" and "allowed is" in str(caught.value)


def test_bans_must_leave_a_token():
    with pytest.raises(InvalidRequestError, match="to leave one of them"):
        SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(2, 1, 3))


def test_min_tokens_counts_resumed_ones():
    SamplingParams(max_tokens=4, min_tokens=10, num_resumed_tokens=6)
    with pytest.raises(InvalidRequestError):
        SamplingParams(max_tokens=4, min_tokens=11, num_resumed_tokens=6)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, SamplingMode.GREEDY),
        ({}, SamplingMode.RANDOM),
        ({"top_p": 0.9}, SamplingMode.TOP_P),
        ({"top_k": 1}, SamplingMode.FILTERED),
        ({"min_p": 0.1, "top_p": 0.9}, SamplingMode.FILTERED),
    ],
)
def test_modes(fields: dict, mode: SamplingMode):
    params = SamplingParams(**fields)
    assert params.mode is mode and not params.needs_processors


@pytest.mark.parametrize("field", [*params_at(Stage.PENALTY, Stage.PROCESSOR), "logprobs"])
def test_what_is_controlled(field: str):
    params = SamplingParams(**{field: EVERY_FIELD[field]})
    assert params.needs_processors and params.has_adjustments == (field != "logprobs")


# --- what this server does


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_token_ids"])
def test_tokens_that_do_not_exist_are_refused(field: str):
    info = dataclasses.replace(INFO, supports_penalties=True)
    value = {VOCAB_SIZE: 1.0} if field == "logit_bias" else (VOCAB_SIZE,)
    with pytest.raises(InvalidRequestError, match=f"token 0 is {VOCAB_SIZE}; allowed is 0 to {VOCAB_SIZE - 1}"):
        info.check(SamplingParams(**{field: value}))
    info.check(SamplingParams(**{field: {0: 1.0} if field == "logit_bias" else (VOCAB_SIZE - 1,)}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bad_token_ids": tuple(range(VOCAB_SIZE))}, "bad_token_ids: got all 128 tokens of the vocabulary"),
        ({"allowed_token_ids": (0, END), "min_tokens": 1}, "min_tokens: got 1, and every one of allowed_token_ids"),
        ({"allowed_token_ids": (7, 9), "bad_token_ids": (9,), "stop_token_ids": (7,), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_leaves_no_token_is_refused(fields: dict, words: str):
    info = dataclasses.replace(INFO, supports_penalties=True)
    with pytest.raises(InvalidRequestError, match=words):
        info.check(SamplingParams(**fields))


def test_a_token_beside_those_that_end_is_enough():
    info = dataclasses.replace(INFO, supports_penalties=True)
    info.check(SamplingParams(allowed_token_ids=(END, 9), min_tokens=1))
    info.check(SamplingParams(allowed_token_ids=(END,), min_tokens=1, ignore_eos=True))
    info.check(SamplingParams(allowed_token_ids=(END,)))


@pytest.mark.parametrize("field", [*params_at(Stage.PENALTY, Stage.PROCESSOR), *params_at(Stage.LOGPROBS)])
def test_a_server_without_controls_refuses_their_fields(field: str):
    params = SamplingParams(**{field: EVERY_FIELD[field]})
    with pytest.raises(InvalidRequestError, match="--no-logits-processors") as caught:
        INFO.check(params)
    assert caught.value.field == f"sampling.{field}"
    dataclasses.replace(INFO, supports_penalties=True, supports_logprobs=True).check(params)
    INFO.check(SamplingParams(min_p=0.5, top_k=3))  # the step's own sampler does these


# --- the contract


def test_every_field_comes_through_the_contract():
    request = messages.generate_request("x", None, EVERY_FIELD)
    found = proto_codec.sampling_params(pb.SamplingParams.FromString(request.sampling.SerializeToString()))
    assert found == SamplingParams(**EVERY_FIELD)
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names == {field.name for field in dataclasses.fields(SamplingParams)}


POSITIONS = (TokenLogprobs(7, -0.5, ((7, -0.5), (3, -1.25))), TokenLogprobs(9, -3.0, ()))


@pytest.mark.parametrize("kind", [pb.GenerateResponse, pb.ChatResponse])
def test_log_probabilities_come_through_the_contract(kind):
    output = Output(request_id="r", token_ids=(7, 9), logprobs=POSITIONS, prompt_logprobs=POSITIONS[::-1])
    chunk = messages.chunk(kind.FromString(proto_codec.answer(kind, output).SerializeToString()))
    assert (chunk.logprobs, chunk.prompt_logprobs) == (POSITIONS, POSITIONS[::-1])
    end = dataclasses.replace(output, finish_reason=FinishReason.LENGTH, prompt_logprobs=())
    whole = messages.completion([chunk, messages.chunk(proto_codec.answer(kind, end))])
    assert (whole.logprobs, whole.prompt_logprobs) == (POSITIONS * 2, POSITIONS[::-1])


def test_gathered_outputs_keep_them_in_order():
    outputs = [Output(request_id="r", token_ids=(one.token_id,), logprobs=(one,)) for one in POSITIONS]
    early = Output(request_id="r", prompt_logprobs=POSITIONS)
    joined = join([early, *outputs])
    assert (joined.token_ids, joined.logprobs, joined.prompt_logprobs) == ((7, 9), POSITIONS, POSITIONS)


def test_a_resumed_stream_repeats_no_log_probability():
    request = pb.GenerateRequest(token_ids=pb.TokenIds(token_ids=[1, 2, 3, 4]))
    request.sampling.prompt_logprobs, request.sampling.max_tokens, request.sampling.min_tokens = 1, 8, 5
    run = resume._Run(request, [1, 2, 3, 4], max_context_tokens=64)

    def message(first: int, last: int, *tokens: int) -> pb.GenerateResponse:
        positions = [pb.TokenLogprobs(token_id=token_id, logprob=-1.0) for token_id in range(first, last)]
        return pb.GenerateResponse(prompt_logprobs=positions, token_ids=tokens)

    def taken(response: pb.GenerateResponse) -> list[int]:
        return [position.token_id for position in run.take(response).prompt_logprobs]

    assert run.next_request().sampling.prompt_logprobs == 1
    assert taken(message(2, 4)) == [2, 3]  # breaks off here
    assert run.next_request().sampling.HasField("prompt_logprobs")
    assert taken(message(2, 3)) == [] and taken(message(3, 5)) == [4] and taken(message(5, 5, 50, 51)) == []
    again = run.next_request().sampling
    assert not again.HasField("prompt_logprobs")
    assert (again.min_tokens, again.max_tokens, again.num_resumed_tokens) == (5, 6, 2)


# --- packed for the device


class Loop:
    """A scheduler and a builder."""

    def __init__(self, **limits: int):
        values = dict(page_size=4, max_running=3, max_step_tokens=8, max_waiting=8, max_context=64) | limits
        self.scheduler = Scheduler(SchedulerLimits(**values), PageAllocator(32), frozenset({END}))
        sizes = {name: values[name] for name in ("max_running", "page_size")}
        self.builder = BatchBuilder(
            declare_buckets(
                max_step_tokens=values["max_step_tokens"], max_decode_steps=values.get("max_decode_steps", 1), **sizes
            ),
            max_request_pages=16,
            processors=ProcessorBatchBuilder(
                max_running=values["max_running"], vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({END})
            ),
            **sizes,
        )

    def add(self, prompt: tuple[int, ...], index: int = 0, **fields: object) -> Request:
        request = Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(**fields), seed=1, index=index)
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[StepPlan, dict[str, np.ndarray], ProcessorBatch | None]:
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        bucket, packed, _, processors = self.builder.build(plan)
        return plan, {name: packed[place] for name, place in bucket.fields.items()}, processors

    def account(self, plan: StepPlan, token_id: int = 9) -> None:
        for step in range(plan.num_steps):
            self.scheduler.account(plan, [token_id] * plan.num_requests, 0.0, step)


def unpacked(processors: ProcessorBatch) -> dict[str, np.ndarray]:
    assert processors.packed is not None
    (shape,) = (shape for shape in map(ProcessorShape, (1, 3)) if shape.size == len(processors.packed))
    return {name: processors.packed[place] for name, place in shape.fields.items()}


def test_steps_that_want_none_of_it_have_none_of_it():
    loop = Loop()
    loop.add((1, 2, 3), top_p=0.9)
    plan, step, processors = loop.step()
    assert processors is None and step["mode"].tolist() == [SamplingMode.TOP_P]
    loop.account(plan)
    assert loop.step()[2] is None


def test_one_controlled_row_is_sampled_beside_others():
    loop = Loop()
    plain = loop.add((1, 2), top_k=7, temperature=0.5)
    adjusted = loop.add((3,), temperature=0.0, presence_penalty=0.5, repetition_penalty=2.0)
    plan, step, processors = loop.step()
    assert processors is not None and [row.slot for row in processors.slots] == [adjusted.slot]
    assert step["mode"].tolist() == [SamplingMode.GREEDY], "the step's own sample is not needed"
    fields = unpacked(processors)
    assert fields["mode"].tolist() == [SamplingMode.FILTERED] and fields["has_logprobs"].tolist() == [0]
    order = [chunk.request for chunk in plan.chunks]
    for index, request in enumerate(order):
        assert fields["slots"][index] == request.slot
        assert fields["flags"][index] == SAMPLES | (ADJUSTS if request is adjusted else 0)
    at = order.index(adjusted)
    assert fields["repetition_penalty"].view(np.float32)[at] == 2.0
    assert fields["presence_penalty"].view(np.float32)[at] == 0.5
    assert fields["temperature"].view(np.float32)[order.index(plain)] == 0.5
    assert fields["slots"][2] == 3, "padding writes nowhere"


def test_a_row_says_what_the_request_has_seen_and_may_take():
    loop = Loop()
    loop.add(
        (1, 2, 2, 8, 8), num_resumed_tokens=2, stop_token_ids=(6,), min_tokens=4, allowed_token_ids=(7, 8, 9),
        logit_bias={8: 1.5, 1: 3.0}, bad_token_ids=(9,),
    )  # fmt: skip
    _, _, processors = loop.step()
    assert processors is not None
    (row,) = processors.slots
    seen = {token: int(row.history[token]) for token in np.flatnonzero(row.history)}
    assert seen == {1: IN_PROMPT, 2: IN_PROMPT, 8: 2, END: ENDS, 6: ENDS}, "what was resumed is output"
    assert max(seen.values()) & COUNT == 0
    finite = {int(token): float(row.bias[token]) for token in np.flatnonzero(np.isfinite(row.bias))}
    assert finite == {7: 0.0, 8: 1.5}, "a bias makes nothing allowed"


def test_end_tokens_are_held_off_for_so_many_tokens():
    loop = Loop()
    request = loop.add((1, 2, 3), min_tokens=2, max_tokens=6)
    must_go_on = []
    for _ in range(4):
        plan, _, processors = loop.step()
        assert processors is not None
        fields = unpacked(processors)
        must_go_on.append(bool(fields["sample_position"][0] < fields["first_end"][0]))
        loop.account(plan)
    assert must_go_on == [True, True, False, False] and len(request.output_token_ids) == 4


def test_a_request_that_lost_its_row_brings_its_output_along():
    loop = Loop()
    loop.add((1, 2, 3), frequency_penalty=1.0)
    for _ in range(3):
        loop.account(loop.step()[0])
    loop.scheduler.preempt_all()
    _, _, processors = loop.step()
    assert processors is not None and processors.slots[0].history[9] == 3


def test_chunks_that_do_not_sample_are_not_counted():
    loop = Loop()
    loop.add(tuple(range(10, 30)), frequency_penalty=1.0)
    flags = []
    for _ in range(3):
        plan, _, processors = loop.step()
        assert processors is not None
        flags.append(int(unpacked(processors)["flags"][0]))
        loop.account(plan)
    assert [bool(flag & SAMPLES) for flag in flags] == [False, False, True]


def test_each_prompt_token_is_asked_for_once():
    loop = Loop()
    prompt = tuple(range(10, 30))
    loop.add(prompt, prompt_logprobs=0)
    loop.account(loop.step()[0])  # positions 0 to 7
    loop.scheduler.preempt_all()
    asked: list[int] = []
    for _ in range(3):
        plan, step, processors = loop.step()
        if processors is not None and processors.prompt_targets is not None:
            assert len(processors.prompt_targets) == len(step["positions"])
            for position, target in zip(step["positions"], processors.prompt_targets, strict=True):
                assert target < 0 or target == prompt[position + 1]
            asked += [int(target) for target in processors.prompt_targets if target >= 0]
        loop.account(plan)
    assert asked == list(prompt[9:])


def test_only_the_first_sample_computes_a_shared_prompt_for_its_log_probabilities():
    loop = Loop()
    prompt = tuple(range(10, 22))
    loop.add(prompt)
    for _ in range(3):
        loop.account(loop.step()[0])
    first, second = (loop.add(prompt, index=index, prompt_logprobs=1) for index in range(2))
    for _ in range(4):
        loop.account(loop.step()[0])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert first.num_prompt_logprobs == len(prompt) - 1 and second.num_prompt_logprobs == 0


def test_controlled_requests_decode_one_step_a_dispatch():
    loop = Loop(max_decode_steps=4)
    plain = loop.add((1, 2), max_tokens=30)
    loop.account(loop.step()[0])
    plan, _, _ = loop.step()
    assert plan.num_steps == 4
    loop.account(plan)
    processed = loop.add((3, 4), max_tokens=30, logprobs=1)
    loop.account(loop.step()[0])
    plan, _, processors = loop.step()
    assert plan.num_steps == 1 and processors is not None
    assert {chunk.request for chunk in plan.chunks} == {plain, processed}


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_token_ids", "stop_token_ids", "stop", "logit_bias"])
def test_lists_that_are_too_long_are_refused_before_they_are_copied(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proto_codec, "plain", lambda value: pytest.fail("copied"))
    message = pb.SamplingParams()
    items = getattr(message, name)
    if name == "logit_bias":
        items.update({index: 1.0 for index in range(2_000)})
    else:
        items.extend(["a"] * 2_000 if name == "stop" else range(2_000))
    with pytest.raises(InvalidRequestError, match=f"sampling.{name}: got 2000 items; allowed is .* or fewer"):
        proto_codec.sampling_params(message)
