"""The table of model classes: what is served, what is refused, and that every entry names what there is."""

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from meshserve.runtime.api.errors import ConfigError, UnsupportedModelError
from meshserve.runtime.weights.hf_layout import checkpoint_tensors, hf_pieces
from meshserve.runtime.weights.orbax_layout import model_layout, stored_pieces
from meshserve.runtime.weights.registry import (
    ARCHITECTURES,
    Architecture,
    abstract_model,
    architecture_of,
    model_config,
    named_model,
    published_config,
)
from meshserve.sharding.layout import moved_qkv_rows

QWEN3 = published_config("qwen3-0.6b")


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_entry_names_what_there_is(architecture: Architecture) -> None:
    for size in architecture.sizes:
        config = named_model(size)
        assert architecture_of(config) is architecture
        layout = model_layout(config, 1)
        _, abstract = abstract_model(config, layout, jnp.dtype("bfloat16"))
        names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(abstract)}
        assert names == hf_pieces(config, layout).keys() == stored_pieces(config, layout).keys()
        if architecture.layer_weights is not None:
            weights = architecture.layer_weights(abstract["layers"])
            assert weights.group_size(config.head_dim) == layout.group_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\]; supported: \['Qwen3For"),
        ({"architectures": ["Qwen3ForCausalLM", "Other"]}, "architectures is"),
        ({"architectures": [], "model_type": "qwen2"}, r"architectures is \[\];"),
        ({"architectures": None, "model_type": None}, "architectures is None;"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; meshserve implements 'qwen3' only"),
    ],
)
def test_another_architecture_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_config({**QWEN3, **changes})


def test_a_file_need_not_say_its_model_type() -> None:
    assert model_config({key: QWEN3[key] for key in QWEN3 if key != "model_type"}) == named_model("qwen3-0.6b")


def test_a_size_that_is_not_published_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match="'qwen3-9b' is not a published size; allowed are qwen3-0.6b, "):
        named_model("qwen3-9b")


def test_tensors_are_those_of_the_published_checkpoint() -> None:
    tensors = checkpoint_tensors(named_model("qwen3-0.6b"))
    assert len(tensors) == 2 + 28 * 11
    assert tensors["model.layers.27.self_attn.q_proj.weight"] == (2048, 1024)
    assert tensors["model.layers.0.self_attn.v_proj.weight"] == (1024, 1024)
    assert tensors["model.layers.0.mlp.up_proj.weight"] == (3072, 1024)
    order = ["input_layernorm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj", "post_attention_layernorm"]
    names = [name.removesuffix(".weight").rpartition(".")[2] for name in tensors]
    assert names[:2] == ["embed_tokens", "norm"]
    assert names[2:13] == [*order, "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("old", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("new", [1, 2, 4, 8, 16])
def test_moved_rows_are_those_of_the_new_layout(old: int, new: int) -> None:
    config, head_dim = named_model("qwen3-0.6b"), 2

    def held(tp: int) -> dict[tuple[int, int], tuple[str, int]]:
        """What each row of each group is: the projection, and the row there."""
        return {
            (rows.group, rows.row + index): (rows.projection, rows.model_row + index)
            for rows in model_layout(config, tp).qkv_rows(head_dim)
            for index in range(rows.num_rows)
        }

    before, moved = held(old), {}
    moves = moved_qkv_rows(model_layout(config, old), model_layout(config, new), head_dim)
    for move in moves:
        for index in range(move.num_rows):
            place = move.group, move.row + index
            assert place not in moved
            moved[place] = before[move.old_group, move.old_row + index]
    assert moved == held(new)
    if old == new <= 8:
        assert len(moves) == 8, "each group in one piece"
