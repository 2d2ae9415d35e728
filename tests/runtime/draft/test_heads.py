"""Tests heads of each kind in the real engine against the formulas, and that they change no token."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.draft.heads.head_programs import chain_buckets
from meshserve.runtime.program.batch import ANY_MODE
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.scheduler.drafts import speculation
from meshserve.runtime.scheduler.drafts.payoff import Payoff
from tests.checkpoints import TINY, save_checkpoint
from tests.runtime.draft.serving import Serving, equal_counts

from .reference import Layout
from .reference_block import BLOCK_SPECULATORS, DFLASH, DFLASH_SMALL
from .reference_head import ANGELSLIM, SPECULATORS, WHOLE_VOCABULARY

DRAFT_TOKENS, VOCAB_SIZE = 3, TINY["vocab_size"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served"), num_hidden_layers=5)


def recorded_proposals(serving: Serving) -> list[tuple[int, list[int]]]:
    """Returns a list that grows by the position of the last token, and the drafts, of each dispatch's first request."""
    runner, proposals = serving.engine.runner, []
    propose = runner.propose

    def recorded(bucket, packed):
        proposed = propose(bucket, packed)
        position, count = (int(packed[bucket.fields[name]][0]) for name in ("positions", "num_steps"))
        proposals.append((position, np.asarray(proposed)[:count, 0].tolist()))
        return proposed

    runner.propose = recorded
    return proposals


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def params(seed: int = 0, **fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=20, ignore_eos=True, seed=seed, **fields)


def test_a_head_proposes_in_as_many_shapes_as_the_model_decodes_in_without_drafts():
    sizes = {"max_step_tokens": 32, "max_running": 16, "page_size": 4, "max_fused_tokens": 4}
    chains = chain_buckets(declare_buckets(has_drafts=True, **sizes), DRAFT_TOKENS)
    assert chains == chain_buckets(declare_buckets(**sizes), DRAFT_TOKENS)
    assert [chain.mode for chain in chains if chain.num_requests == 8] == [ANY_MODE]


@pytest.mark.parametrize(
    ("layout", "tp"),
    [(ANGELSLIM, 1), (SPECULATORS, 2), (WHOLE_VOCABULARY, 8), (DFLASH, 1), (BLOCK_SPECULATORS, 2), (DFLASH_SMALL, 8)],
    ids=["eagle-angelslim", "eagle-speculators", "eagle-all", "block", "block-speculators", "block-small"],
)
def test_a_head_drafts_what_the_formulas_say_and_changes_no_token(
    served: Path, tmp_path: Path, layout: Layout, tp: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(speculation, "draft_counts", equal_counts)  # a random head would soon get few
    tensors = layout.save(tmp_path, VOCAB_SIZE)
    serving = Serving(
        model=str(served), draft_model=str(tmp_path), draft_tokens=DRAFT_TOKENS, tp=tp, page_size=4, num_pages=80,
        max_running=8, max_step_tokens=8, max_context=100, logits_processors=False,
    )  # fmt: skip
    proposals = recorded_proposals(serving)
    model = AutoModelForCausalLM.from_pretrained(served).eval()
    tables = (table.weight.detach().numpy() for table in (model.get_input_embeddings(), model.get_output_embeddings()))
    reference = layout.reference(tensors, *tables)
    first = prompt(1, 22)
    # In chunks of 8 tokens; the second begins with five pages of the first; the third has one token and no context.
    for its_prompt in (first, first[:21] + prompt(2, 3), prompt(3, 1)):
        monkeypatch.setattr(Payoff, "wants_drafts", False)
        (plain,) = serving.alone([(its_prompt, params(temperature=0.0))])
        assert not proposals
        monkeypatch.setattr(Payoff, "wants_drafts", True)
        assert serving.alone([(its_prompt, params(temperature=0.0))]) == [plain]
        text = its_prompt + plain
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hidden = [states[layer][0].numpy() for layer in layout.layers_read]
        assert len(proposals) > 5
        for position, drafts in proposals:
            assert drafts == reference.draft(text[: position + 1], hidden, len(drafts)), position
        assert max(len(drafts) for _, drafts in proposals) == DRAFT_TOKENS
        proposals.clear()

    prompts = [first, first[:20] + prompt(5, 4), prompt(6, 9), prompt(7, 2)]
    requests = [(each, params(seed, temperature=0.7, top_p=0.9)) for seed, each in enumerate(prompts)]
    monkeypatch.setattr(Payoff, "wants_drafts", False)
    expected = serving.together(requests)
    asked = iter(range(10**9))  # drafting begins and ends at any step
    monkeypatch.setattr(Payoff, "wants_drafts", property(lambda self: next(asked) % 23 < 17))
    assert serving.together(requests) == expected
    assert proposals
    serving.check_all_is_free()
    assert serving.launched.info.draft_model == tmp_path.name
    serving.launched.close()
