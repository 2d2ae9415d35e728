"""Tests each logits processor alone, with numpy: what it keeps of a request, and how that changes logits."""

import numpy as np
import pytest

from meshserve.runtime.api.request import Request
from meshserve.runtime.api.sampling_params import SamplingParams, Stage, params_at
from meshserve.runtime.program.packing import PARAM_FIELDS
from meshserve.runtime.program.processors import PROCESSORS
from meshserve.runtime.program.processors.contract import COUNT, LogitsProcessor, ProcessorState

END, VOCAB_SIZE = 7, 8
LOGITS = np.array([1.0, -1.0, 2.0, -2.0, 0.5, 0.0, 3.0, 4.0])


def changed(processor: LogitsProcessor, params: dict[str, object], position: int = 3) -> np.ndarray:
    """Applies a processor for a request with a prompt of 0, 1, 2 and an output of 2, 2, 3."""
    request = Request(request_id="r", prompt_token_ids=(0, 1, 2), params=SamplingParams(**params), seed=1)
    request.output_token_ids += [2, 2, 3]
    state = ProcessorState(np.zeros(VOCAB_SIZE, np.int32), np.zeros(VOCAB_SIZE, np.float32))
    processor.write_slot(request, state, frozenset({END}))
    fields = dict(zip(processor.fields, np.array([processor.values(request)]).reshape(-1, 1, 1), strict=True))
    rows = ProcessorState(*(array[None] for array in state))
    return processor.apply(LOGITS[None], rows, {**fields, "sample_position": np.array([[position]])})[0]


def family_of(param: str) -> LogitsProcessor:
    (family,) = (processor for processor in PROCESSORS if param in processor.params)
    return family


def test_every_parameter_belongs_to_one_family():
    """A parameter that changes logits but that no module of `program/processors` implements would be ignored."""
    implemented = sorted(name for processor in PROCESSORS for name in processor.params)
    assert implemented == sorted(params_at(Stage.PENALTY, Stage.PROCESSOR))


def test_fields_of_families_are_distinct():
    names = [name for processor in PROCESSORS for name in processor.fields]
    assert len(names) == len({*names, *PARAM_FIELDS, "slots", "flags", "sample_position"}) - len(PARAM_FIELDS) - 3


@pytest.mark.parametrize(
    ("param", "value", "expected"),
    [
        ("logit_bias", {1: 2.5, 6: -1.0}, [1.0, 1.5, 2.0, -2.0, 0.5, 0.0, 2.0, 4.0]),
        ("frequency_penalty", 0.5, [1.0, -1.0, 1.0, -2.5, 0.5, 0.0, 3.0, 4.0]),
        ("presence_penalty", 0.5, [1.0, -1.0, 1.5, -2.5, 0.5, 0.0, 3.0, 4.0]),
        ("repetition_penalty", 2.0, [0.5, -2.0, 1.0, -4.0, 0.5, 0.0, 3.0, 4.0]),
    ],
)
def test_a_parameter_changes_the_logits_of_its_tokens(param: str, value: object, expected: list[float]):
    np.testing.assert_array_equal(changed(family_of(param), {param: value}), expected)


def test_families_that_share_the_history_leave_the_counts_alone():
    request = Request(request_id="r", prompt_token_ids=(2,), params=SamplingParams(), seed=1)
    request.output_token_ids += [2, 2, 3]
    state = ProcessorState(np.zeros(VOCAB_SIZE, np.int32), np.zeros(VOCAB_SIZE, np.float32))
    for processor in PROCESSORS:
        processor.write_slot(request, state, frozenset({END}))
    assert (state.history & COUNT).tolist() == [0, 0, 2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"allowed_token_ids": (2, 5)}, {2, 5}),
        ({"bad_token_ids": (2, 5)}, {0, 1, 3, 4, 6, 7}),
        ({"allowed_token_ids": (2, 5), "bad_token_ids": (5,), "logit_bias": {0: 9.0}}, {2}),
    ],
)
def test_excluded_tokens_have_no_probability(params: dict[str, object], kept: set[int]):
    """The ban is written as a bias, so both modules write and one applies."""
    request = Request(request_id="r", prompt_token_ids=(0,), params=SamplingParams(**params), seed=1)
    state = ProcessorState(np.zeros(VOCAB_SIZE, np.int32), np.zeros(VOCAB_SIZE, np.float32))
    families = [family_of("logit_bias"), family_of("bad_token_ids")]
    for processor in families:
        processor.write_slot(request, state, frozenset())
    logits = LOGITS[None]
    for processor in families:
        logits = processor.apply(logits, ProcessorState(*(array[None] for array in state)), {})
    assert set(np.flatnonzero(np.isfinite(logits[0]))) == kept


@pytest.mark.parametrize(("position", "is_excluded"), [(3, True), (4, True), (5, False)])
def test_end_tokens_are_excluded_up_to_the_minimum(position: int, is_excluded: bool):
    logits = changed(family_of("min_tokens"), {"min_tokens": 2, "stop_token_ids": (4,)}, position)
    assert np.flatnonzero(np.isneginf(logits)).tolist() == ([4, END] if is_excluded else [])
