"""Tests the parsing of config.json, and the rotary embedding that it describes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.api.model_config import ModelConfig
from meshserve.runtime.layers.rope import inverse_frequencies
from meshserve.runtime.weights.registry import named_model, read_model

# The config.json of Qwen/Qwen3-0.6B, as written by transformers 4.51.
PUBLISHED = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def published(**changes: Any) -> dict[str, Any]:
    return {**PUBLISHED, **changes}


def refusal(**changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict(published(**changes))
    return str(caught.value)


# --- config.json


def test_every_number_of_the_published_file_arrives():
    config = ModelConfig.from_dict(PUBLISHED)
    assert (config.vocab_size, config.embed_dim, config.mlp_dim, config.num_layers) == (151936, 1024, 3072, 28)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (16, 8, 128)
    assert (config.rms_norm_eps, config.max_positions, config.is_tied) == (1e-6, 40960, True)
    assert (config.dtype, config.rope.kind, config.rope.theta) == ("bfloat16", "default", 1e6)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"])
def test_what_transformers_saves_of_every_size_is_read_back(name: str, tmp_path: Path):
    size = named_model(name)
    theirs = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=size.vocab_size,
        hidden_size=size.embed_dim,
        intermediate_size=size.mlp_dim,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_query_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_positions,
        tie_word_embeddings=size.is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    )
    theirs.save_pretrained(tmp_path)
    config = read_model(tmp_path / "config.json")
    assert config == size
    with torch.device("meta"):
        assert config.num_params == Qwen3ForCausalLM(theirs).num_parameters()


def test_an_option_nobody_knows_is_named():
    message = refusal(attention_sinks=4, residual_scale=0.5)
    assert "does not know: attention_sinks, residual_scale. They might change the model's results" in message
    ModelConfig.from_dict(published(attention_sinks=None))  # null requests nothing


def test_quantized_weights_are_not_read_as_others():
    """`Architecture.read_config` takes the key out and reads it."""
    assert "does not know: quantization_config" in refusal(quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", True), ("use_sliding_window", True), ("hidden_act", "gelu")],
)
def test_an_option_that_is_known_but_not_implemented_is_named(key: str, value: object):
    assert f"{key} is {value!r}; meshserve implements only {PUBLISHED[key]!r}" in refusal(**{key: value})


def test_a_layer_with_a_window_is_named():
    message = refusal(layer_types=["full_attention", "sliding_attention"])
    assert "'sliding_attention'" in message and "meshserve implements only full_attention" in message


@pytest.mark.parametrize("length", [0, 1, 27, 29])
def test_layer_types_name_every_layer(length: int):
    message = refusal(layer_types=["full_attention"] * length)
    assert f"layer_types names {length} layers and num_hidden_layers is 28; they must agree" in message
    ModelConfig.from_dict(published(layer_types=["full_attention"] * 28))


@pytest.mark.parametrize("key", ["head_dim", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads"])
def test_nothing_is_guessed_that_the_file_does_not_say(key: str):
    assert f"config.json lacks {key}" in refusal(**{key: None})


def test_kv_heads_must_divide_the_query_heads():
    assert "16 query heads are not a multiple of 6 KV heads" in refusal(num_key_value_heads=6)


def test_a_missing_or_broken_file(tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match="config.json does not exist. --model takes a Hugging Face"):
        read_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="config.json is not valid JSON"):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["[]", "null", "3", '"a"'])
def test_a_file_that_holds_no_object(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"config.json contains JSON of type \w+; it must be an object"):
        read_model(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(UnsupportedModelError, match="config.json is not valid JSON"):
        read_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("num_key_value_heads", 0, "a whole number, 1 or more"), ("num_attention_heads", "16", "a whole number"),
        ("num_hidden_layers", 28.0, "a whole number"), ("vocab_size", True, "a whole number"),
        ("head_dim", 127, "an even number"), ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", 0, "true or false"), ("rms_norm_eps", math.nan, "a number above 0"),
        ("rms_norm_eps", "1e-6", "a number above 0"), ("rms_norm_eps", 0, "a number above 0"),
        ("rope_theta", 1.0, "a number above 1"), ("rope_theta", math.inf, "a number above 1"),
        ("rope_scaling", "yarn", "an object"), ("rope_scaling", False, "an object"),
        ("rope_parameters", [], "an object"),
        ("layer_types", True, "only full_attention"), ("layer_types", 0, "only full_attention"),
        ("layer_types", "", "only full_attention"), ("layer_types", [["full_attention"]], "only full_attention"),
        ("dtype", 7, "bfloat16, float32, float16"), ("dtype", "", "bfloat16, float32, float16"),
        ("dtype", ["bfloat16"], "bfloat16, float32, float16"), ("torch_dtype", "float8_e4m3fn", "bfloat16, float32"),
        ("torch_dtype", False, "bfloat16, float32, float16"), ("head_dim", 128.0, "a whole number"),
        ("num_hidden_layers", "28", "a whole number"), ("rms_norm_eps", True, "a number above 0"),
        ("rope_theta", "1e6", "a number above 1"), ("rope_theta", [1e6], "a number above 1"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(key: str, value: object, allowed: str):
    message = refusal(**{key: value})
    assert f"{key} is {value!r}; " in message and allowed in message


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("factor", 0.0, "a number above 0"), ("factor", -4.0, "a number above 0"), ("factor", 0.5, "1 or more"),
        ("factor", "4", "a number above 0"), ("factor", math.nan, "a number above 0"),
        ("original_max_position_embeddings", -1, "a number above 0"), ("attention_factor", 0.0, "a number above 0"),
        ("beta_fast", "32", "a number above 0"), ("truncate", "false", "true or false"),
        ("original_max_position_embeddings", 4096.5, "a whole number"),
    ],
)  # fmt: skip
def test_rope_options_that_mean_nothing_are_refused_by_name(key: str, value: object, allowed: str):
    message = refusal(rope_scaling={"rope_type": "yarn", "factor": 2.0, key: value})
    assert f"{key} is {value!r}; allowed is {allowed}" in message


# --- rotary embedding

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn by the length of the model": {"rope_type": "yarn", "factor": 2.0},
    "yarn that scales nothing": {"rope_type": "yarn", "factor": 1.0},
    "yarn with its own temperature": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    "yarn with betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn not truncated": {
        "rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 8192,
    },
    "yarn with mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn for a short context": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("is_old_form", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", ROPES)
def test_the_rotation_is_that_of_transformers(name: str, theta: float, is_old_form: bool):
    parameters = {**ROPES[name], "rope_theta": theta}
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(rope_parameters=parameters, max_position_embeddings=40960, head_dim=128, hidden_size=1024)
    )
    if is_old_form:
        raw = published(rope_scaling=ROPES[name], rope_theta=theta)
    else:
        raw = published(rope_parameters=parameters, rope_theta=None)
    rope = ModelConfig.from_dict(raw).rope
    np.testing.assert_allclose(inverse_frequencies(rope, 128), theirs.inv_freq.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_the_oldest_form_names_its_kind_type():
    rope = ModelConfig.from_dict(published(rope_scaling={"type": "linear", "factor": 2.0})).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize("kind", ["llama3", "dynamic", "longrope", "proportional"])
def test_other_rope_scaling_is_refused_by_name(kind: str):
    message = refusal(rope_scaling={"rope_type": kind, "factor": 2.0})
    assert f"rope scaling {kind!r} is not implemented; allowed are default, linear, yarn" in message


def test_rope_options_are_never_ignored():
    scaling = {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}
    assert "'yarn' has unknown options partial_rotary_factor" in refusal(rope_scaling=scaling)
    assert "'yarn' needs a factor" in refusal(rope_scaling={"rope_type": "yarn"})
    assert "'yarn' needs a factor" in refusal(rope_scaling={"rope_type": "yarn", "factor": None})
    assert "lacks rope_theta" in refusal(rope_theta=None)
