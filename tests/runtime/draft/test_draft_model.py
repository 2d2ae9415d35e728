"""Tests a draft model in the real engine: it changes no token, and the drafts of one that agrees are accepted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshserve.kernels.decode_layers import sm90
from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.scheduler.drafts import speculation
from meshserve.runtime.scheduler.drafts.payoff import Payoff
from tests import checkpoints
from tests.runtime.draft.serving import Serving, equal_counts

DRAFT_TOKENS = 3


def serving_with(draft_model: str, tp: int) -> Serving:
    return Serving(
        model="demo", draft_model=draft_model, draft_tokens=DRAFT_TOKENS, tp=tp, page_size=8, num_pages=60,
        max_running=4, max_step_tokens=8, max_context=200, draft_min_match=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """The draft model is the served model itself, over two devices."""
    serving = serving_with("demo", tp=2)
    yield serving
    serving.launched.close()


def of(seed: int, max_tokens: int = 40, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **fields)


SHARED = "Enter HAMLET, and HORATIO, with others of the court, "
FREE = [
    ("To be", of(1, temperature=0.0)),
    ("HAMLET.\nO ", of(2, temperature=1.0)),
    (SHARED, of(3, temperature=1.3, top_p=0.9)),
    (SHARED + "to him.", of(4, temperature=0.8, top_k=30, min_p=0.02, logprobs=1)),
]
CHANGED = [
    ("To be", of(5, temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.3)),
    (SHARED, of(6, temperature=1.1, presence_penalty=0.5, logit_bias={400: 3.0}, min_tokens=1)),
    ("I am ", of(7, temperature=0.5, constraint=Constraint(kind="regex", text="(aye|no)( (aye|no)){30}"))),
    ("What, ", SamplingParams(seed=8, temperature=1.0, max_tokens=60, stop=("th",))),
]


@pytest.fixture(scope="module")
def expected(serving: Serving) -> list[list[int]]:
    """What each request gets alone, without a draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Payoff, "wants_drafts", False)
        tokens = serving.alone([*FREE, *CHANGED])
    assert not serving.num_drafts
    return tokens


def test_drafts_of_a_model_that_agrees_are_accepted_at_every_temperature(
    serving: Serving, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """It draws with the noise of the served model, so that only a tie may tell them apart."""
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    monkeypatch.setattr(speculation, "draft_counts", equal_counts)  # not by the time of steps on a busy machine
    for request, tokens in zip(FREE, expected, strict=False):
        serving.records.clear()
        assert serving.alone([request]) == [tokens]
        num_drafts, num_accepted = serving.num_drafts, serving.num_accepted
        assert num_accepted >= 0.95 * num_drafts > 20
        num_decodes = sum(record.num_decodes for record in serving.records)
        assert num_decodes <= 2 + 40 / (1 + DRAFT_TOKENS) + num_drafts - num_accepted


def test_a_draft_model_changes_no_token(serving: Serving, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    assert serving.alone(CHANGED) == expected[len(FREE) :]
    for is_preempted in (False, True):
        names = [serving.submit(*request) for request in (*FREE, *CHANGED)]
        leaving = [serving.submit("Exit ", of(20 + index, 150, temperature=1.0)) for index in range(3)]
        if is_preempted:
            serving.preempt_all()
        for name in leaving:
            serving.cancel(name)
        assert serving.wait(*names) == expected
        serving.wait(*leaving)
    serving.check_all_is_free()


def test_a_draft_model_does_nothing_in_a_pause_and_makes_up_for_it(
    serving: Serving, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Also of a prefix that was computed meanwhile, and where drafting begins in the middle of a request."""
    draft, buckets = serving.engine.runner.draft, []
    run = draft.run
    monkeypatch.setattr(draft, "run", lambda bucket, packed: buckets.append(bucket) or run(bucket, packed))
    monkeypatch.setattr(Payoff, "wants_drafts", False)
    assert serving.alone(FREE) == expected[: len(FREE)]
    assert not buckets
    serving.records.clear()
    asked = iter(range(10**9))
    monkeypatch.setattr(Payoff, "wants_drafts", property(lambda self: next(asked) > 60))
    assert serving.alone(FREE) == expected[: len(FREE)]
    assert serving.num_accepted >= 0.95 * serving.num_drafts > 60


def test_drafts_that_do_not_pay_leave_the_tokens_as_they_are(
    serving: Serving, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Drafting begins and ends many times, at any step."""
    asked = iter(range(10**9))
    monkeypatch.setattr(Payoff, "wants_drafts", property(lambda self: next(asked) % 23 < 11))
    assert serving.together([*FREE, *CHANGED]) == expected
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    serving.records.clear()
    assert serving.alone(FREE) == expected[: len(FREE)]
    assert serving.num_accepted >= 0.95 * serving.num_drafts > 60


def test_it_follows_steps_that_are_not_fused(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch):
    """Twice as many tokens as on fused layers have programs with and without drafts; the draft model has one."""
    monkeypatch.setattr(sm90, "MAX_CACHED_TOKENS", 4)
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    monkeypatch.setattr(speculation, "draft_counts", equal_counts)
    serving = Serving(
        model="demo", draft_model="demo", draft_tokens=DRAFT_TOKENS, tp=1, page_size=8, num_pages=60, max_running=8,
        max_step_tokens=8, max_context=200, decode_layers="reference",
    )  # fmt: skip
    followed_by = serving.engine.runner._followed_by
    larger = {bucket: follower for bucket, follower in followed_by.items() if bucket.num_tokens == 8}
    decodes = {follower for bucket, follower in larger.items() if bucket.is_decode}
    assert {bucket.has_drafts for bucket in larger if bucket.is_decode} == {False, True}
    assert [bucket.has_drafts for bucket in decodes] == [True]
    assert serving.together([*FREE, *CHANGED[:3]]) == expected[:-1]
    assert serving.together(FREE) == expected[: len(FREE)]
    assert serving.num_accepted > 20
    serving.check_all_is_free()
    serving.launched.close()


def test_the_model_info_names_the_draft_model(serving: Serving):
    info = serving.launched.info
    assert (info.draft_model, info.draft_tokens) == ("demo", DRAFT_TOKENS)


def test_the_tp_size_cannot_change(serving: Serving):
    with pytest.raises(ConfigError, match="tp: it cannot change while a draft model is served"):
        serving.launched.resharder.change_tp(1)


def test_a_draft_model_that_errs_changes_no_token(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
):
    if not pytestconfig.getoption("--every-case"):
        pytest.skip("one draft model is enough in `make test`")
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    serving = serving_with(str(checkpoints.truncated_demo(tmp_path, 5)), tp=1)
    assert serving.together([*FREE, *CHANGED]) == expected
    assert 0 < serving.num_accepted < serving.num_drafts
    serving.launched.close()


def test_a_model_with_another_vocabulary_is_refused(tmp_path: Path):
    checkpoints.save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="has a vocabulary of 320 tokens and the served model one of 2048"):
        serving_with(str(tmp_path), tp=1)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "draft_tokens is 0; allowed is 2 or more"),
        ({"draft_tokens": 4, "max_decode_steps": 4}, "max_decode_steps is 4; allowed is 1"),
    ],
)
def test_options_that_contradict_a_draft_model_are_refused(options: dict[str, Any], fault: str):
    with pytest.raises(ConfigError, match=fault):
        ServeConfig(**options, draft_model="demo")


def test_another_tokenizer_is_refused(tmp_path: Path):
    directory = checkpoints.truncated_demo(tmp_path, 1)
    content = json.loads((directory / "tokenizer.json").read_text())
    first, second = list(content["model"]["vocab"].items())[300:302]
    content["model"]["vocab"] |= {first[0]: second[1], second[0]: first[1]}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="has another tokenizer than the served model"):
        serving_with(str(directory), tp=1)
