"""Tests that the files of heads are read as they are meant, or refused by what is wrong with them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.draft.heads.block_config import read_block_drafter
from meshserve.runtime.draft.heads.eagle3_config import is_eagle3, read_eagle3
from meshserve.runtime.draft.heads.head_weights import kind_of, load_head
from meshserve.runtime.weights.registry import model_config, named_model, published_config
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh

from .published import PUBLISHED_BLOCK as BLOCK
from .published import PUBLISHED_HEAD as HEAD
from .reference import EMBED, VOCAB, Layout
from .reference_block import BLOCK_SPECULATORS
from .reference_head import ANGELSLIM, SPECULATORS

SERVED = named_model("qwen3-8b")


def test_the_published_head_of_qwen3_8b_is_read():
    config = read_eagle3(HEAD, SERVED)
    assert (config.layer.vocab_size, config.served_vocab_size) == (32_000, 151_936)
    assert (config.layers_read, config.is_residual_normed) == ((2, 18, 33), False)
    assert config.layer.rope.theta == 1e6
    assert is_eagle3(HEAD) and not is_eagle3(published_config("qwen3-8b"))


def test_layers_are_named_by_their_outputs_or_by_their_inputs():
    by_output = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 16, 34], "use_aux_hidden_state": True}}
    assert read_eagle3(HEAD | by_output, SERVED).layers_read == (2, 17, 35)
    layer = {key: value for key, value in HEAD.items() if key not in ("architectures", "draft_vocab_size")}
    nested = {
        "architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, "draft_vocab_size": 64_000,
        "eagle_aux_hidden_state_layer_ids": [0, 16, 34], "norm_before_residual": True, "target_hidden_size": 4096,
        "speculators_config": {"algorithm": "eagle3"}, "speculators_model_type": "eagle3",
    }  # fmt: skip
    config = read_eagle3(nested, SERVED)
    assert (config.layers_read, config.is_residual_normed) == ((0, 16, 34), True)
    assert config.layer.vocab_size == 64_000
    without = {key: value for key, value in HEAD.items() if key not in ("head_dim", "draft_vocab_size")}
    config = read_eagle3(without, SERVED)
    assert (config.layer.head_dim, config.layer.vocab_size) == (128, 151_936)


def test_the_published_drafter_of_qwen3_8b_is_read():
    config = read_block_drafter(BLOCK, SERVED)
    assert (config.layers_read, config.mask_token_id, config.block_size) == ((2, 10, 18, 26, 34), 151_669, 16)
    assert (config.layer.num_layers, config.has_own_head) == (5, False)
    by_default = read_block_drafter(BLOCK | {"dflash_config": {"mask_token_id": 151_669}}, SERVED)
    assert by_default == config
    layer = {key: value for key, value in BLOCK.items() if key not in ("architectures", "dflash_config")}
    nested = {
        "architectures": ["DFlashSpeculator"], "transformer_layer_config": layer, "mask_token_id": 151_669,
        "block_size": 8, "aux_hidden_state_layer_ids": [2, 18, 33], "draft_vocab_size": 32_000,
    }  # fmt: skip
    config = read_block_drafter(nested, SERVED)
    assert (config.layers_read, config.block_size, config.has_own_head) == ((2, 18, 33), 8, True)
    assert kind_of(BLOCK) is kind_of(nested) is not None


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (HEAD, {"clip_features": 3}, "options that meshserve does not know: clip_features"),
        (HEAD, {"norm_before_fc": True}, "norm_before_fc is True; meshserve implements only False"),
        (HEAD, {"fc_norm": True}, "fc_norm is True"),
        (HEAD, {"num_hidden_layers": 2}, "num_hidden_layers is 2; meshserve implements only 1"),
        (HEAD, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (HEAD, {"attention_bias": True}, "attention_bias is True"),
        (HEAD, {"rope_theta": None}, "lacks rope_theta"),
        (HEAD, {"hidden_size": 5120}, "hidden_size is 5120 and the served model has 4096"),
        (HEAD, {"target_hidden_size": 2560}, "target_hidden_size is 2560"),
        (HEAD, {"vocab_size": 128256}, "vocab_size is 128256 and the served model has 151936"),
        (HEAD, {"draft_vocab_size": 200_000}, "draft_vocab_size is 200000; allowed is 1 to 151936"),
        (HEAD, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        (HEAD, {"eagle_config": {"tree_width": 8}}, "eagle_config has tree_width = 8"),
        (HEAD, {"eagle_aux_hidden_state_layer_ids": [2, 18]}, r"layers \(2, 18\); 3 of 0 to 35"),
        (HEAD, {"eagle_aux_hidden_state_layer_ids": [2, 18, 36]}, r"layers \(2, 18, 36\)"),
        (HEAD, {"eagle_aux_hidden_state_layer_ids": [18, 2, 33]}, "ascending order"),
        (BLOCK, {"markov_rank": 256}, "options that meshserve does not know: markov_rank"),
        (BLOCK, {"projector_type": "domino"}, "projector_type is 'domino'; meshserve implements only 'dflash'"),
        (BLOCK, {"sample_from_anchor": True}, "sample_from_anchor is True"),
        (BLOCK, {"dflash_config": {"mask_token_id": 1, "causal": True}}, "causal is True"),
        (BLOCK, {"dflash_config": {"mask_token_id": 1, "top_k": 4}}, "dflash_config has top_k = 4"),
        (BLOCK, {"dflash_config": {}}, "mask_token_id is None; allowed is 0 to 151935"),
        (BLOCK, {"block_size": None}, "block_size is None; allowed is 2 to"),
        (BLOCK, {"layer_types": ["sliding_attention"] * 5}, "implements only full_attention"),
        (BLOCK, {"num_target_layers": 28}, "num_target_layers is 28 and the served model has 36"),
        (BLOCK, {"hidden_size": 5120}, "hidden_size is 5120 and the served model has 4096"),
        (
            BLOCK,
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 35]}},
            r"layers \(2, 36\); some of 0 to 35",
        ),
        (BLOCK, {"aux_hidden_state_layer_ids": []}, r"layers \(\); some of 0 to 35"),
        (BLOCK, {"aux_hidden_state_layer_ids": [2, 2]}, r"layers \(2, 2\); some of 0 to 35"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(published: dict[str, Any], changes: dict[str, Any], message: str):
    kind = kind_of(published)
    assert kind is not None
    with pytest.raises(UnsupportedModelError, match=message):
        kind.config(published | changes, SERVED)


@pytest.mark.parametrize(
    ("layout", "missing", "unknown"),
    [
        (ANGELSLIM, "fc.weight", "fc.bias"),
        (SPECULATORS, "fc.weight", "fc.bias"),
        (BLOCK_SPECULATORS, "layers.1.self_attn.k_norm.weight", "markov.weight"),
    ],
    ids=["eagle-angelslim", "eagle-speculators", "block-speculators"],
)
def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path, layout: Layout, missing: str, unknown: str):
    kind, tables = kind_of(layout.config(320)), {"embedding": jnp.zeros((320, EMBED))}
    assert kind is not None
    sizes = {"hidden_size": EMBED, "num_hidden_layers": 64, "vocab_size": 320}
    config = kind.config(layout.config(320), model_config(published_config("qwen3-8b") | sizes))
    tensors = layout.save(tmp_path, 320)

    def load_without(name: str, **more: np.ndarray) -> Any:
        kept = {key: value for key, value in (tensors | more).items() if key != name}
        save_file(kept, tmp_path / "model.safetensors")
        return load_head(kind, tmp_path, config, make_mesh(1), jnp.dtype("float32"), tables)

    _, params = load_without("")
    assert params["token_ids"].get_value().tolist() == (tensors["d2t"] + range(VOCAB)).tolist()
    with pytest.raises(CheckpointError, match=f"1 missing: {missing}"):
        load_without(missing)
    with pytest.raises(CheckpointError, match=f"1 not part of this model: {unknown}"):
        load_without("", **{unknown: tensors["norm.weight"]})
    with pytest.raises(CheckpointError, match="vocabulary of 96 tokens, but no tensor d2t"):
        load_without("d2t")
