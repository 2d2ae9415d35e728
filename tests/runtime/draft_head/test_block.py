"""Tests block drafters in the real engine against the formulas, and that they change no token."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.draft_head.block_config import read_block_drafter
from meshserve.runtime.draft_head.head_weights import kind_of, load_head
from meshserve.runtime.drafting.payoff import Payoff
from meshserve.runtime.scheduler import speculation
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh

from .published import PUBLISHED_BLOCK as PUBLISHED
from .reference_block import (
    DFLASH,
    DFLASH_SMALL,
    SPECULATORS,
    BlockLayout,
    ReferenceBlock,
    save_block_drafter,
)
from .reference_head import EMBED
from .test_eagle3 import DRAFT_TOKENS, VOCAB_SIZE, Serving, equal_counts, prompt
from .test_eagle3 import served as served  # a fixture
from .test_eagle3_files import read_served

QWEN3_8B = named_model("qwen3-8b")


@pytest.mark.parametrize(
    ("layout", "tp"), [(DFLASH, 1), (SPECULATORS, 2), (DFLASH_SMALL, 8)], ids=["dflash", "speculators", "small"]
)
def test_a_block_drafter_drafts_what_the_formulas_say_and_changes_no_token(
    served: Path, tmp_path: Path, layout: BlockLayout, tp: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(speculation, "draft_counts", equal_counts)  # a random drafter would soon get few
    tensors = save_block_drafter(tmp_path, layout, VOCAB_SIZE)
    serving = Serving(served, tmp_path, tp)
    model = AutoModelForCausalLM.from_pretrained(served).eval()
    tables = (table.weight.detach().numpy() for table in (model.get_input_embeddings(), model.get_output_embeddings()))
    drafter = ReferenceBlock(tensors, layout, *tables)
    first = prompt(1, 22)
    # In chunks of 8 tokens; the second begins with five pages of the first; the third has one token and no context.
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
            assert drafts == drafter.draft(text[: position + 1], hidden, len(drafts)), position
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
    serving.launched.close()


def test_the_published_drafter_of_qwen3_8b_is_read():
    config = read_block_drafter(PUBLISHED, QWEN3_8B)
    assert (config.layers_read, config.mask_token_id, config.block_size) == ((2, 10, 18, 26, 34), 151_669, 16)
    assert (config.layer.num_layers, config.has_own_head) == (5, False)
    by_default = read_block_drafter(PUBLISHED | {"dflash_config": {"mask_token_id": 151_669}}, QWEN3_8B)
    assert by_default == config
    layer = {key: value for key, value in PUBLISHED.items() if key not in ("architectures", "dflash_config")}
    nested = {
        "architectures": ["DFlashSpeculator"], "transformer_layer_config": layer, "mask_token_id": 151_669,
        "block_size": 8, "aux_hidden_state_layer_ids": [2, 18, 33], "draft_vocab_size": 32_000,
    }  # fmt: skip
    config = read_block_drafter(nested, QWEN3_8B)
    assert (config.layers_read, config.block_size, config.has_own_head) == ((2, 18, 33), 8, True)
    assert kind_of(PUBLISHED) is kind_of(nested) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 256}, "options that meshserve does not know: markov_rank"),
        ({"projector_type": "domino"}, "projector_type is 'domino'; meshserve implements only 'dflash'"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"dflash_config": {"mask_token_id": 1, "causal": True}}, "causal is True"),
        ({"dflash_config": {"mask_token_id": 1, "top_k": 4}}, "dflash_config has top_k = 4"),
        ({"dflash_config": {}}, "mask_token_id is None; allowed is 0 to 151935"),
        ({"block_size": None}, "block_size is None; allowed is 2 to"),
        ({"layer_types": ["sliding_attention"] * 5}, "implements only full_attention"),
        ({"num_target_layers": 28}, "num_target_layers is 28 and the served model has 36"),
        ({"hidden_size": 5120}, "hidden_size is 5120 and the served model has 4096"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 35]}}, r"layers \(2, 36\); some of 0 to 35"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        read_block_drafter(PUBLISHED | changes, QWEN3_8B)


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path):
    kind, served = kind_of(SPECULATORS.config(320)), read_served(5, 320)
    assert kind is not None
    config, tables = kind.config(SPECULATORS.config(320), served), {"embedding": jnp.zeros((320, EMBED))}
    tensors = save_block_drafter(tmp_path, SPECULATORS, 320)

    def load() -> None:
        load_head(kind, tmp_path, config, make_mesh(1), jnp.dtype("float32"), tables)

    load()
    name = "layers.1.self_attn.k_norm.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"1 missing: {name}"):
        load()
    save_file(tensors | {"markov.weight": tensors["norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 not part of this model: markov.weight"):
        load()
    save_file({key: value for key, value in tensors.items() if key != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="vocabulary of 96 tokens, but no tensor d2t"):
        load()
