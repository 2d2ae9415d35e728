"""Random requests with every drafter: greedy tokens are those without drafts, whatever happens to a request.

Requests are preempted, because the cache is small and all at once, cancelled, stopped by strings and tokens, held to
grammars, under penalties, and resumed in the middle; drafting is switched off and on at any step. `make traffic` sends
1,000 requests to each drafter.
"""

import collections
import dataclasses
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.scheduler.drafts import speculation
from meshserve.runtime.scheduler.drafts.payoff import Payoff
from tests import checkpoints
from tests.runtime.draft.reference_block import BlockLayout
from tests.runtime.schemas import random_document_schema, random_regex

from .serving import Serving, equal_counts

NUM_PAGES, NUM_CROWDED_PAGES, MAX_RUNNING, NUM_OPEN, DRAFT_TOKENS = 256, 36, 16, 6, 3
PLAYS = ("Enter HAMLET, and HORATIO, with others of the court, ", "KING.\nWhat says ", "To be, or not to be, ", "O ")
DEMO_EMBED, DEMO_VOCAB = 192, 2048


def draft_model_of(drafter: str, directory: Path) -> str:
    """Returns what to name as `draft_model`; "" for prompt lookup."""
    if drafter == "draft model":
        return str(checkpoints.truncated_demo(directory, 5))
    if drafter == "block":
        layout = BlockLayout(layers_read=(1, 3, 5), num_layers=2, has_whole_vocabulary=True, embed_dim=DEMO_EMBED)
        layout.save(directory, DEMO_VOCAB)
        return str(directory)
    return {"lookup": "", "EAGLE-3": "demo-head"}[drafter]


def random_request(draw: random.Random) -> tuple[str, SamplingParams]:
    prompt = draw.choice(PLAYS) * draw.choice([1, 1, 2]) + "".join(draw.choices(string.ascii_letters, k=3))
    kind = draw.choice(["free", "free", "stopped", "changed", "regex", "schema"])
    fields: dict[str, Any] = {"ignore_eos": True}
    if kind == "stopped":
        fields = {"stop": (draw.choice(["the", "\n", "you", "\n\n"]),), "stop_token_ids": (draw.randrange(300, 2000),)}
    elif kind == "changed":
        fields |= draw.choice(
            [
                {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
                {"presence_penalty": 0.5, "min_tokens": 3},
                {"logit_bias": {draw.randrange(300, 2000): 4.0}, "logprobs": 1},
            ]
        )
    elif kind == "regex":
        fields = {"constraint": Constraint(kind="regex", text=random_regex(draw) + "!")}
    elif kind == "schema":
        fields = {"constraint": Constraint(kind="json_schema", text=json.dumps(random_document_schema(draw)))}
    return prompt, SamplingParams(temperature=0.0, max_tokens=draw.randint(3, 60), seed=0, **fields)


@pytest.mark.usefixtures("greedy_programs")
@pytest.mark.parametrize("drafter", ["EAGLE-3", "block", "draft model", "lookup"])
def test_greedy_tokens_are_those_without_drafts(
    drafter: str, tmp_path: Path, num_random_requests: int, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
):
    if drafter in ("draft model", "lookup") and not pytestconfig.getoption("--every-case"):
        pytest.skip("other tests have these drafters in `make test`")
    monkeypatch.setattr(speculation, "draft_counts", equal_counts)
    serving = Serving(
        model="demo", draft_model=draft_model_of(drafter, tmp_path), draft_tokens=DRAFT_TOKENS, draft_min_match=1,
        page_size=8, num_pages=NUM_PAGES, max_running=MAX_RUNNING, max_step_tokens=32, max_context=256,
        max_waiting=10_000,
    )  # fmt: skip
    draw = random.Random(drafter)
    requests = [random_request(draw) for _ in range(num_random_requests)]
    monkeypatch.setattr(Payoff, "wants_drafts", False)
    expected = serving.together(requests)
    ends = list(serving.ends[str(index)].finish_reason for index in range(len(requests)))
    assert not serving.num_drafts
    asked = iter(range(10**9))
    monkeypatch.setattr(Payoff, "wants_drafts", property(lambda self: next(asked) % 97 < 80))
    serving.preempt_all(NUM_CROWDED_PAGES)
    serving.records.clear()
    counts: collections.Counter[str] = collections.Counter()
    names, resumed_at, cancelled = [], [], set()
    first = len(serving.ends)
    for index, ((prompt, params), tokens) in enumerate(zip(requests, expected, strict=True)):
        num_resumed = draw.randrange(1, len(tokens)) if len(tokens) > 1 and draw.random() < 0.25 else 0
        resumed_at.append(num_resumed)
        token_ids = [*serving.launched.tokenizer.encode(prompt), *tokens[:num_resumed]]
        rest = dataclasses.replace(params, num_resumed_tokens=num_resumed, max_tokens=params.max_tokens - num_resumed)
        names.append(serving.submit(token_ids, rest))
        counts["resumed"] += num_resumed > 0
        if draw.random() < 0.15:
            cancelled.add(name := draw.choice(names[-NUM_OPEN:]))
            serving.cancel(name)
        serving.wait_for(first + index + 1 - NUM_OPEN)  # with more, steps would have no room for drafts
        if draw.random() < 0.03:
            serving.preempt_all(NUM_CROWDED_PAGES)
            counts["preempted all"] += 1
    outputs = serving.wait(*names)
    for index, (name, tokens) in enumerate(zip(names, outputs, strict=True)):
        its_expected, end = expected[index][resumed_at[index] :], serving.ends[name].finish_reason
        assert end is not None
        counts[end.value] += 1
        if end is FinishReason.CANCELLED:
            assert name in cancelled and tokens == its_expected[: len(tokens)]
        else:
            assert (tokens, end) == (its_expected, ends[index]), (index, requests[index])
    serving.check_all_is_free(NUM_CROWDED_PAGES)
    counts["preempted"] = sum(record.num_preempted for record in serving.records)
    print(f"{drafter}: {num_random_requests} requests, {dict(counts)}, {serving.num_accepted} of {serving.num_drafts} "
          f"drafts held, {sum(map(len, outputs))} tokens")  # fmt: skip
    assert 0 < serving.num_accepted < serving.num_drafts or drafter == "block"
    serving.launched.close()
