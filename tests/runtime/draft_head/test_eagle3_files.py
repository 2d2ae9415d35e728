"""Tests that the files of an EAGLE-3 head are read as they are meant, or refused by what is wrong with them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from safetensors.numpy import save_file

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.api.model_config import ModelConfig
from meshserve.runtime.draft_head.eagle3_config import is_eagle3, read_eagle3
from meshserve.runtime.draft_head.head_weights import kind_of, load_head
from meshserve.runtime.weights.registry import model_config, named_model, published_config
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh

from .published import PUBLISHED_HEAD as HEAD
from .reference_head import ANGELSLIM, EMBED, SPECULATORS, VOCAB, save_head

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_features": 3}, "options that meshserve does not know: clip_features"),
        ({"norm_before_fc": True}, "norm_before_fc is True; meshserve implements only False"),
        ({"fc_norm": True}, "fc_norm is True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; meshserve implements only 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"hidden_size": 5120}, "hidden_size is 5120 and the served model has 4096"),
        ({"target_hidden_size": 2560}, "target_hidden_size is 2560"),
        ({"vocab_size": 128256}, "vocab_size is 128256 and the served model has 151936"),
        ({"draft_vocab_size": 200_000}, "draft_vocab_size is 200000; allowed is 1 to 151936"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        ({"eagle_config": {"tree_width": 8}}, "eagle_config has tree_width = 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18]}, r"layers \(2, 18\); 3 of 0 to 35"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 36]}, r"layers \(2, 18, 36\)"),
        ({"eagle_aux_hidden_state_layer_ids": [18, 2, 33]}, "ascending order"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        read_eagle3(HEAD | changes, SERVED)


@pytest.mark.parametrize("layout", [ANGELSLIM, SPECULATORS], ids=["angelslim", "speculators"])
def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path, layout):
    served = read_served(64, 320)
    config = read_eagle3(layout.config(320), served)
    kind, mesh, tables = kind_of(layout.config(320)), make_mesh(1), {"embedding": jnp.zeros((320, EMBED))}
    assert kind is not None
    tensors = save_head(tmp_path, layout, 320)
    _, params = load_head(kind, tmp_path, config, mesh, jnp.dtype("float32"), tables)
    ids = params["token_ids"].get_value()
    assert ids.tolist() == (tensors["d2t"] + range(VOCAB)).tolist()
    save_file({name: value for name, value in tensors.items() if name != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 missing: fc.weight"):
        load_head(kind, tmp_path, config, mesh, jnp.dtype("float32"), tables)
    save_file(tensors | {"fc.bias": tensors["norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 not part of this model: fc.bias"):
        load_head(kind, tmp_path, config, mesh, jnp.dtype("float32"), tables)
    save_file({name: value for name, value in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="vocabulary of 96 tokens, but no tensor d2t"):
        load_head(kind, tmp_path, config, mesh, jnp.dtype("float32"), tables)


def read_served(num_layers: int, vocab_size: int) -> ModelConfig:
    """Returns the config of a served model of the heads' embedding size."""
    sizes = {"hidden_size": EMBED, "num_hidden_layers": num_layers, "vocab_size": vocab_size}
    return model_config(published_config("qwen3-8b") | sizes)
