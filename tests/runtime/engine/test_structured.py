"""Tests constraints in the real engine: every output obeys its own, whatever else is served.

With the demo model; and, where outputs must have certain texts, with the second model, whose tokenizer changes texts.
"""

import dataclasses
import json
import math
import random
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonschema
import pytest

from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.request import FinishReason, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.scheduler.drafts.payoff import Payoff
from meshserve.runtime.startup.launch import Launched, launch
from meshserve.runtime.text import constrained_samples
from meshserve.runtime.text.grammar import Grammars, compiled
from meshserve.runtime.text.mask_exchange import MaskExchange
from tests.runtime.schemas import Schema, forced_regex, forced_schema, random_document_schema, random_regex

PROMPT = "Thou art a scholar; speak to it, Horatio.\n"
PATIENCE_SECONDS = 3000.0  # enough for 1,000 outputs and more
NUM_PAGES = 256


class Serving:
    """An engine and the outputs that it has delivered."""

    def __init__(self, model: str = "demo", max_running: int = 16) -> None:
        config = ServeConfig(
            model=model, cpu_devices=8, dtype="float32", page_size=8, num_pages=NUM_PAGES, max_running=max_running,
            max_step_tokens=max_running, max_context=1000, max_waiting=10_000, cache_dir="", draft_tokens=3,
            draft_min_match=1,
        )  # fmt: skip
        self.records: list[StepRecord] = []
        self.launched: Launched = launch(config, self._deliver, self.records.append)
        self.texts: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self._changed = threading.Condition()
        self._num_submitted = 0
        self.launched.engine.start()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                name = f"{output.request_id}.{output.index}" if output.index else output.request_id
                self.texts[name] = self.texts.get(name, "") + output.text
                self.tokens.setdefault(name, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[name] = output
            self._changed.notify_all()

    def submit(self, params: SamplingParams, resumed: Sequence[int] = (), n: int = 1) -> str:
        name = str(self._num_submitted)
        self._num_submitted += n
        grammar = compiled(params.constraint, self.launched.grammars, resumed)
        prompt = (*self.launched.tokenizer.encode(PROMPT), *resumed)
        params = dataclasses.replace(params, num_resumed_tokens=len(resumed))
        self.launched.engine.submit(name, prompt, params, RequestOptions(n=n), grammar)
        return name

    def wait(self, num_ended: int | None = None) -> None:
        """Waits until the given number of requests have ended, or all."""
        needed = self._num_submitted if num_ended is None else num_ended
        with self._changed:
            is_done = self._changed.wait_for(lambda: len(self.ends) >= needed, PATIENCE_SECONDS)
            assert is_done, self.launched.engine.failure

    def num_tokens(self) -> int:
        """Returns the number of tokens and ends that have been delivered."""
        with self._changed:
            return len(self.ends) + sum(map(len, self.tokens.values()))

    def wait_for_token(self, num_tokens: int) -> None:
        """Waits until more than the given number of tokens have been delivered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_tokens() > num_tokens, PATIENCE_SECONDS)

    def preempt_all(self) -> None:
        """Preempts all running requests, wherever they are in their grammars."""
        engine = self.launched.engine
        engine.rebuild(lambda: (engine.runner, NUM_PAGES))

    def run(self, *all_params: SamplingParams) -> list[tuple[str, list[int], Output]]:
        """Serves all requests together and returns text, tokens and last output of each."""
        names = [self.submit(params) for params in all_params]
        self.wait()
        return [(self.texts[name], self.tokens[name], self.ends[name]) for name in names]


@pytest.fixture(scope="module")
def serving(optimised: None) -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.launched.close()


@pytest.fixture(scope="module")
def second_serving(optimised: None, second_model: Path) -> Iterator[Serving]:
    serving = Serving(str(second_model), max_running=8)  # has fewer programs to compile
    yield serving
    serving.launched.close()


def held_to(kind: str, text: str, **fields: object) -> SamplingParams:
    constraint = Constraint(kind=kind, text=text)  # type: ignore[arg-type]
    return SamplingParams(**{"temperature": 1.5, "max_tokens": 960, "constraint": constraint, **fields})


def free(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.5, max_tokens=40, seed=seed, ignore_eos=True)


def test_every_output_keeps_to_its_constraint(serving: Serving, num_structured: int):
    rng = random.Random(11)
    schemas = [random_document_schema(rng) for _ in range(num_structured)]
    expressions = [random_regex(rng) + "!" for _ in range(num_structured)]
    check_outputs(serving, schemas, expressions)


def test_every_output_has_the_texts_that_it_must_have(second_serving: Serving, num_structured: int):
    rng = random.Random(12)
    schemas = [forced_schema(rng) for _ in range(num_structured)]
    expressions = [forced_regex(rng) for _ in range(num_structured)]
    check_outputs(second_serving, schemas, expressions)


def check_outputs(serving: Serving, schemas: Sequence[Schema], expressions: Sequence[str]) -> None:
    """Checks the outputs of requests with these constraints, which are preempted now and then, beside others."""
    names, formats = [], jsonschema.FormatChecker()
    for seed, (schema, expression) in enumerate(zip(schemas, expressions, strict=True)):
        names.append(serving.submit(held_to("json_schema", json.dumps(schema), seed=seed)))
        names.append(serving.submit(held_to("regex", expression, seed=seed)))
        if seed % 8 == 0:
            serving.submit(free(seed))
    for num_ended in range(1, len(names), 20):
        serving.wait(num_ended)
        serving.preempt_all()
    serving.wait()
    for name, schema in zip(names[0::2], schemas, strict=True):
        assert serving.ends[name].finish_reason is FinishReason.STOP, (schema, serving.ends[name])
        value = json.loads(serving.texts[name])
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=formats)
    for name, expression in zip(names[1::2], expressions, strict=True):
        assert serving.ends[name].finish_reason is FinishReason.STOP, (expression, serving.ends[name])
        assert re.fullmatch(expression, serving.texts[name]), (expression, serving.texts[name])


COMPANY = [
    free(1),
    held_to("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 4}', seed=2),
    free(3),
    held_to("regex", "([A-Z][a-z]{2,9} ){1,20}", seed=4),
    held_to("grammar", 'start: word ("," word)*\nword: /[a-z]+/', seed=5, max_tokens=30),
]


def test_company_does_not_change_a_token(serving: Serving):
    """Other requests with constraints in the same batch have no effect either."""
    alone = [serving.run(params)[0][:2] for params in COMPANY]
    together = [(text, tokens) for text, tokens, _ in serving.run(*COMPANY)]
    assert together == alone
    assert any(record.num_draft_tokens and record.num_decodes > 1 for record in serving.records)
    names = [serving.submit(params) for params in COMPANY]
    serving.preempt_all()
    serving.wait()
    assert [(serving.texts[name], serving.tokens[name]) for name in names] == alone
    assert len({len(tokens) for _, tokens in alone}) > 2


def test_masks_that_are_always_late_change_no_token(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    """Also where the requests are preempted while they wait for them, and begin again in several steps."""
    params = [held_to("regex", "([A-Z][a-z]{2,9} ){3}", seed=seed) for seed in range(6)]
    expected = [tokens for _, tokens, _ in serving.run(*params)]
    monkeypatch.setattr(constrained_samples, "PATIENCE_SECONDS", 0.0)
    num_ended = len(serving.ends)
    names = [serving.submit(each) for each in params]
    while len(serving.ends) < num_ended + len(params):
        num_tokens = serving.num_tokens()
        serving.preempt_all()
        serving.wait_for_token(num_tokens)
    assert [serving.tokens[name] for name in names] == expected


REPETITIVE = [
    held_to("regex", "([0-9]{3};){15}", seed=6, temperature=0.0),
    held_to("regex", "(to be or not; ?){10}", seed=7, temperature=1.0),
    held_to(
        "json_schema", '{"type": "array", "items": {"enum": ["aye", "no"]}, "minItems": 20}', seed=10, max_tokens=60
    ),
    held_to("regex", "([ab]c){25}", seed=8, temperature=0.3, frequency_penalty=0.02, ignore_eos=True),
    SamplingParams(temperature=0.2, seed=9, max_tokens=80, repetition_penalty=1.01, ignore_eos=True),
]


def test_drafts_change_no_token_of_constrained_or_penalised_requests(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Payoff, "wants_drafts", False)
        expected = [(text, tokens, end.finish_reason) for text, tokens, end in serving.run(*REPETITIVE)]
        assert not any(record.num_draft_tokens for record in serving.records[-20:])
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    for params, whole in zip(REPETITIVE, expected, strict=True):
        serving.records.clear()
        [(text, tokens, end)] = serving.run(params)
        assert (text, tokens, end.finish_reason) == whole
        assert sum(record.num_accepted_tokens for record in serving.records) > 3, whole
    names = [serving.submit(params) for params in REPETITIVE]
    serving.preempt_all()
    serving.wait()
    assert [(serving.texts[name], serving.tokens[name]) for name in names] == [whole[:2] for whole in expected]


def test_each_sample_follows_the_grammar_by_itself(serving: Serving):
    params = held_to("regex", "([A-Z][a-z]{2,9} ){1,4}", seed=7)
    name = serving.submit(params, n=3)
    serving.wait()
    texts = [serving.texts[name], serving.texts[f"{name}.1"], serving.texts[f"{name}.2"]]
    alone = serving.run(*(dataclasses.replace(params, seed=7 + index) for index in range(3)))
    assert texts == [text for text, *_ in alone] and len(set(texts)) > 1


def test_an_output_that_broke_off_goes_on_in_its_grammar(serving: Serving):
    params = COMPANY[3]
    [(text, tokens, _)] = serving.run(params)
    for num_tokens in (1, len(tokens) // 2, len(tokens) - 1):
        name = serving.submit(params, resumed=tokens[:num_tokens])
        serving.wait()
        assert tokens[:num_tokens] + serving.tokens[name] == tokens
        assert text.endswith(serving.texts[name])


def test_the_grammar_ends_the_output(serving: Serving):
    choices = Constraint(kind="choice", choices=("To be", "Not to be"))
    params = SamplingParams(constraint=choices, ignore_eos=True, max_tokens=100)
    for text, tokens, end in serving.run(*(dataclasses.replace(params, seed=seed) for seed in range(8))):
        assert text in choices.choices and end.finish_reason is FinishReason.STOP
        assert end.num_output_tokens == len(tokens)  # the end token is not included


def test_with_ignore_eos_the_output_goes_on_while_it_may(serving: Serving):
    [(text, _, end)] = serving.run(held_to("regex", "[a-z]{0,9}", ignore_eos=True, seed=1))
    assert re.fullmatch("[a-z]{9}", text) and end.finish_reason is FinishReason.STOP
    [(text, tokens, end)] = serving.run(held_to("regex", "[a-z]*", ignore_eos=True, seed=1, max_tokens=20))
    assert re.fullmatch("[a-z]{20,}", text) and (len(tokens), end.finish_reason) == (20, FinishReason.LENGTH)


def test_what_cuts_an_output_short_leaves_a_beginning(serving: Serving):
    params = held_to("regex", "([0-9]{3};){50}", seed=6)
    [(whole, _, _)] = serving.run(params)
    short = [dataclasses.replace(params, max_tokens=5), dataclasses.replace(params, stop=(whole[7:9],))]
    for (text, _, end), reason in zip(serving.run(*short), (FinishReason.LENGTH, FinishReason.STOP), strict=True):
        assert end.finish_reason is reason and 0 < len(text) < len(whole) and whole.startswith(text)


def test_no_token_left_is_an_error_and_not_a_wrong_output(serving: Serving):
    digits = serving.launched.tokenizer.encode("0123456789")
    [(text, token_ids, end)] = serving.run(held_to("regex", "[a-z]+", allowed_token_ids=digits))
    assert (text, token_ids, end.num_output_tokens, end.finish_reason) == ("", [], 0, FinishReason.ERROR)
    assert "no token was left that the constraint and the other sampling parameters both allow" in end.message


def test_nobody_ends_because_others_have_filled_the_grammar(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    """Its lexer has room for the states of one or two of these outputs, but not of all."""
    regex = "|".join(f"{letter}[a-z {letter.upper()}]{{100}}!" for letter in "abcdefgh")
    several = [held_to("regex", regex, seed=seed) for seed in range(12)]
    expected = [tokens for _, tokens, _ in serving.run(*several)]
    launched = serving.launched
    for name in ("grammar._FAST_SECONDS", "mask_exchange._RESTART_SECONDS"):  # however busy the machine is
        monkeypatch.setattr(f"meshserve.runtime.text.{name}", math.inf)
    tokenizer_file, eos_token_ids = launched.tokenizer.directory / "tokenizer.json", launched.info.eos_token_ids
    grammars = Grammars(tokenizer_file, launched.info.vocab_size, eos_token_ids, max_lexer_states=300, num_ahead=3)
    monkeypatch.setattr(serving, "launched", dataclasses.replace(launched, grammars=grammars))
    monkeypatch.setattr(launched.engine._open.constrained, "_exchange", MaskExchange())  # no workers of other limits
    ends = serving.run(*several)
    assert {end.finish_reason for _, _, end in ends} == {FinishReason.STOP}, [end.message for _, _, end in ends]
    assert [tokens for _, tokens, _ in ends] == expected
    assert launched.engine._open.constrained._exchange.num_restarts > 0
    grammars.close()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_output_that_was_complete_when_it_broke_off_ends_at_once(serving: Serving, ignore_eos: bool):
    params = held_to("regex", "[a-z]{9}", ignore_eos=ignore_eos, seed=3)
    [(text, tokens, _)] = serving.run(params)
    assert re.fullmatch("[a-z]{9}", text)
    name = serving.submit(params, resumed=tokens)
    serving.wait()
    assert (serving.texts[name], serving.tokens[name]) == ("", [])
    assert serving.ends[name].finish_reason is FinishReason.STOP


def test_a_grammar_that_is_given_up_says_so(serving: Serving):
    """After the first brace, the grammar has more items than llguidance allows."""
    properties = {f"k{index}": {"type": "string"} for index in range(600)}
    schema = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    [(_, _, end)] = serving.run(held_to("json_schema", schema))
    assert end.finish_reason is FinishReason.ERROR
    assert "the constraint could not be followed: Parser Error: Current row has" in end.message


def test_min_tokens_may_be_more_than_any_output_has(serving: Serving):
    params = SamplingParams(temperature=0.0, max_tokens=2**32 - 1, min_tokens=2**31 - 2)
    name = serving.submit(params, resumed=[300] * 900)  # so that the context is soon full
    serving.wait()
    assert serving.ends[name].finish_reason is FinishReason.LENGTH and 30 < len(serving.tokens[name]) < 100


def test_min_tokens_holds_off_every_kind_of_stop(serving: Serving):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [(whole, tokens, _)] = serving.run(params)
    stop = whole[3:7]
    late = dataclasses.replace(params, min_tokens=12)
    (early_text, *_), (text, got, _), (_, banned, end) = serving.run(
        dataclasses.replace(params, stop=(stop,)),
        dataclasses.replace(late, stop=(stop,)),
        dataclasses.replace(late, stop_token_ids=tuple(set(tokens))),
    )
    assert early_text == whole[: whole.index(stop)]
    assert got == tokens[: len(got)] and len(got) >= 12 and text.startswith(whole[: whole.index(stop) + 4])
    assert len(banned) >= 12 and not set(banned[:12]) & set(tokens)
