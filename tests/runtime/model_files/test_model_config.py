"""Tests the parsing of config.json, and the rotary embedding that it describes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model.layers.rope import inverse_frequencies
from meshserve.runtime.model_files.config_notes import ConfigNotes
from meshserve.runtime.model_files.model_config import DEFAULTS, ModelConfig
from meshserve.runtime.weights.registry import model_config, named_model, read_model

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


def test_keys_that_are_not_known_are_ignored_by_name(caplog: pytest.LogCaptureFixture):
    """As by transformers. With `--strict-config` they are refused."""
    config = ModelConfig.from_dict(published(zigzag_rate=4, my_notes="x", wheels=None))  # null requests nothing
    assert config.notes == ConfigNotes(unknown=("my_notes", "zigzag_rate"))
    assert config == ModelConfig.from_dict(PUBLISHED)
    config.notes.log()
    (record,) = caplog.records
    assert record.getMessage() == "config.json: keys that meshserve does not know are ignored: my_notes, zigzag_rate"
    with pytest.raises(UnsupportedModelError, match="does not know: my_notes, zigzag_rate.*omit --strict-config"):
        config.notes.check_empty()


# What trainers and releases of transformers add to the published file.
HARMLESS = {
    "unsloth_fixed": True, "unsloth_version": "2026.8.4", "_attn_implementation_autoset": True, "torchscript": False,
    "auto_map": {"AutoModel": "modeling_qwen3.Qwen3ForCausalLM"}, "tokenizer_class": "Qwen2Tokenizer",
    "mlp_bias": False, "is_causal": True, "temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 20,
    "repetition_penalty": 1.05, "num_return_sequences": 1, "suppress_tokens": None, "pruned_heads": {}, "prefix": None,
    "task_specific_params": None, "pretraining_tp": 1, "partial_rotary_factor": 1.0, "use_bfloat16": False,
    "gradient_checkpointing": False, "tf_legacy_loss": False, "attention_bias": None,
}  # fmt: skip


def test_keys_that_change_nothing_need_no_note():
    config = ModelConfig.from_dict(published(**HARMLESS))
    assert config == ModelConfig.from_dict(PUBLISHED) and config.notes == ConfigNotes()


@pytest.mark.parametrize("base", [PreTrainedConfig, Qwen3Config, Qwen3MoeConfig])
def test_every_key_that_transformers_writes_is_known(base: type[PreTrainedConfig]):
    written = {key: value for key, value in base().to_dict().items() if key not in PUBLISHED and value is not None}
    written = {key: value for key, value in written.items() if key not in ("layer_types", "rope_parameters", "dtype")}
    model_type = "qwen3_moe" if base is Qwen3MoeConfig else "qwen3"
    config = model_config({**PUBLISHED, **written, "model_type": model_type, "architectures": None})
    assert config.notes.unknown == ()


def test_quantized_weights_are_not_read_as_others():
    """`Architecture.read_config` takes the key out and reads it."""
    config = ModelConfig.from_dict(published(quantization_config={"quant_method": "fp8"}))
    assert config.notes.unknown == ("quantization_config",) and config.quantization is None


@pytest.mark.parametrize(
    ("key", "value", "implemented"),
    [
        ("attention_bias", True, "only False"), ("use_sliding_window", True, "only False"),
        ("hidden_act", "gelu", "only 'silu'"), ("mlp_bias", True, "only False"), ("is_causal", False, "only True"),
        ("partial_rotary_factor", 0.5, "only 1.0"), ("attention_sinks", 4, "models without it"),
        ("residual_scale", 0.5, "models without it"), ("final_logit_softcapping", 30.0, "models without it"),
    ],
)  # fmt: skip
def test_an_option_that_is_known_but_not_implemented_is_named(key: str, value: object, implemented: str):
    assert f"{key} is {value!r}; meshserve implements {implemented}" in refusal(**{key: value})


def test_a_layer_with_a_window_is_named():
    message = refusal(layer_types=["full_attention", "sliding_attention"])
    assert "'sliding_attention'" in message and "meshserve implements only full_attention" in message


@pytest.mark.parametrize("length", [0, 1, 27, 29])
def test_layer_types_name_every_layer(length: int):
    message = refusal(layer_types=["full_attention"] * length)
    assert f"layer_types names {length} layers and num_hidden_layers is 28; they must agree" in message
    ModelConfig.from_dict(published(layer_types=["full_attention"] * 28))


MOE_KEYS = {
    "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip


def theirs(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns all keys with the values that transformers' class has for a file, heads of null as its modules do."""
    kind = Qwen3MoeConfig if raw["model_type"] == "qwen3_moe" else Qwen3Config
    written = kind.from_dict(raw).to_dict()
    written.setdefault("head_dim", written["hidden_size"] // written["num_attention_heads"])
    return {**written, "architectures": None, "model_type": raw["model_type"]}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_absent_keys_have_the_defaults_of_transformers(model_type: str):
    """Each by itself and all together; the notes name them with their values, and `--strict-config` refuses them."""
    experts = MOE_KEYS if model_type == "qwen3_moe" else {}
    raw = {**PUBLISHED, "num_attention_heads": 64, "model_type": model_type, **experts}
    raw = {key: value for key, value in raw.items() if key not in ("architectures", "torch_dtype", "rope_scaling")}
    keys = [key for key in raw if key in (*DEFAULTS, *MOE_KEYS, "rope_theta")]
    for absent in [*([key] for key in keys), keys]:
        config = model_config({key: value for key, value in raw.items() if key not in absent})
        assert config == model_config(theirs({key: value for key, value in raw.items() if key not in absent})), absent
        assert {note.partition(" = ")[0] for note in config.notes.assumed} == {*absent, "architectures"}
    assert "architectures" in config.notes.assumed[-1]
    with pytest.raises(UnsupportedModelError, match="lacks options: .*head_dim = .*omit --strict-config"):
        config.notes.check_empty()


def test_a_class_is_found_by_its_model_type():
    assert model_config(published(architectures=None)).model_type == "qwen3"
    assert model_config(published(architectures=None)).notes.assumed == ('architectures = ["Qwen3ForCausalLM"]',)
    for raw in (published(architectures=None, model_type=None), published(architectures=["Qwen3ForQuestionAnswering"])):
        with pytest.raises(UnsupportedModelError, match="architectures is"):
            model_config(raw)


def test_kv_heads_of_null_are_as_many_as_query_heads():
    assert ModelConfig.from_dict(published(num_key_value_heads=None)).num_kv_heads == 16


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
        ("num_key_value_heads", 0, "a whole number, 1 to 1024"), ("num_attention_heads", "16", "a whole number"),
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
        ("factor", 0.0, "a number, 1 to 10000"), ("factor", -4.0, "a number, 1 to"), ("factor", 0.5, "a number, 1 to"),
        ("factor", "4", "a number, 1 to 10000"), ("factor", math.nan, "a number, 1 to 10000"),
        ("original_max_position_embeddings", -1, "a whole number, 1 to"), ("attention_factor", 0.0, "a number above 0"),
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
