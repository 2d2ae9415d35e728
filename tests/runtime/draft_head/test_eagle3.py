"""Tests EAGLE-3 heads in the real engine against the formulas, and that they change no token."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshserve.runtime.api.request import Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.drafting.payoff import Payoff
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.scheduler import speculation
from meshserve.runtime.startup.launch import launch
from tests.checkpoints import TINY, save_checkpoint
from tests.waiting import WAIT_SECONDS

from .reference_head import ANGELSLIM, SPECULATORS, WHOLE_VOCABULARY, Layout, ReferenceHead, save_head

DRAFT_TOKENS, PAGE_SIZE, VOCAB_SIZE = 3, 4, TINY["vocab_size"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served"), num_hidden_layers=5)


class Serving:
    """An engine with a head, what it has delivered, and every dispatch that proposed draft tokens."""

    def __init__(self, served: Path, head: Path | None, tp: int):
        config = ServeConfig(
            model=str(served), draft_model=str(head) if head is not None else "", draft_tokens=DRAFT_TOKENS, tp=tp,
            cpu_devices=8, dtype="float32", page_size=PAGE_SIZE, num_pages=80, max_running=8, max_step_tokens=8,
            max_context=100, cache_dir="", logits_processors=False,
        )  # fmt: skip
        self.tokens: dict[str, list[int]] = {}
        self.proposed: list[tuple[int, list[int]]] = []  # of the first request: position of its last token, and drafts
        self._num_ended, self._changed = 0, threading.Condition()
        self.launched = launch(config, self._deliver)
        self.engine = self.launched.engine
        if head is not None:
            propose = self.engine.runner.propose

            def recorded(bucket, packed):
                proposed = np.asarray(propose(bucket, packed))
                position, count = (int(packed[bucket.fields[name]][0]) for name in ("positions", "num_steps"))
                self.proposed.append((position, proposed[:count, 0].tolist()))
                return proposed

            self.engine.runner.propose = recorded
        self.engine.start()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self._num_ended += output.finish_reason is not None
            self._changed.notify_all()

    def run(self, name: str, prompts: Sequence[list[int]], **fields: float) -> list[list[int]]:
        expected = self._num_ended + len(prompts)
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=index, **fields)
            self.engine.submit(f"{name}{index}", prompt, params)
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_ended == expected, WAIT_SECONDS), self.engine.failure
        return [self.tokens[f"{name}{index}"] for index in range(len(prompts))]


def equal_counts(shares: Sequence[float], lengths: Sequence[int], costs: object, *, num_tokens: int, room: int):
    """Replaces `draft_counts`."""
    return [min(length, room // len(lengths)) for length in lengths]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize(
    ("layout", "tp"), [(ANGELSLIM, 1), (SPECULATORS, 2), (WHOLE_VOCABULARY, 8)], ids=["angelslim", "speculators", "all"]
)
def test_a_head_drafts_what_the_formulas_say_and_changes_no_token(
    served: Path, tmp_path: Path, layout: Layout, tp: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(speculation, "draft_counts", equal_counts)  # a random head would soon get few
    tensors = save_head(tmp_path, layout, VOCAB_SIZE)
    serving = Serving(served, tmp_path, tp)
    model = AutoModelForCausalLM.from_pretrained(served).eval()
    embedding = model.get_input_embeddings().weight.detach().numpy()
    head = ReferenceHead(tensors, layout, embedding)
    first = prompt(1, 22)
    # In chunks of 8 tokens; the second begins with five pages of the first; the third has one token.
    for name, its_prompt in (("a", first), ("b", first[:21] + prompt(2, 3)), ("c", prompt(3, 1))):
        monkeypatch.setattr(Payoff, "wants_drafts", False)
        (plain,) = serving.run(f"{name} plain", [its_prompt], temperature=0.0)
        assert not serving.proposed
        monkeypatch.setattr(Payoff, "wants_drafts", True)
        (drafted,) = serving.run(name, [its_prompt], temperature=0.0)
        assert drafted == plain
        text = its_prompt + plain
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hidden = [states[layer][0].numpy() for layer in layout.layers_read]
        assert len(serving.proposed) > 5
        for position, drafts in serving.proposed:
            assert drafts == head.draft(text[: position + 1], hidden, len(drafts)), position
        assert max(len(drafts) for _, drafts in serving.proposed) == DRAFT_TOKENS
        serving.proposed.clear()

    prompts = [first, first[:20] + prompt(5, 4), prompt(6, 9), prompt(7, 2)]
    monkeypatch.setattr(Payoff, "wants_drafts", False)
    expected = serving.run("together", prompts, temperature=0.7, top_p=0.9)
    asked = iter(range(10**9))  # drafting begins and ends at any step
    monkeypatch.setattr(Payoff, "wants_drafts", property(lambda self: next(asked) % 23 < 17))
    assert serving.run("drafted", prompts, temperature=0.7, top_p=0.9) == expected
    assert serving.proposed
    load = serving.engine.load()
    assert load.num_free_pages == load.num_pages
    assert serving.launched.info.draft_model == tmp_path.name
    serving.launched.close()
