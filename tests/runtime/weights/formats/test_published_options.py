"""`quantization_config` as the tools write it: read, or refused by the name of what cannot be honored."""

import json
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from transformers import AutoRoundConfig, AwqConfig, FineGrainedFP8Config, GPTQConfig, Qwen3Config
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model_files.quantization import Quantization
from meshserve.runtime.weights.formats.published import METHODS, read_quantization
from meshserve.runtime.weights.registry import model_config, published_config

K_PROJ = "model.layers.3.self_attn.k_proj"


def written(config: Any, directory: Path) -> dict[str, Any]:
    """Returns the `quantization_config` that transformers writes to config.json."""
    Qwen3Config(quantization_config=config).save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def read(raw: dict[str, Any]) -> Quantization:
    """Returns what is read if every option is known."""
    unknown: list[str] = []
    quantization = read_quantization(raw, "bfloat16", unknown)
    assert not unknown
    return quantization


# --- transformers

CLASSES = {
    "fp8": FineGrainedFP8Config(),
    "fp8 with a list": FineGrainedFP8Config(modules_to_not_convert=["lm_head", K_PROJ]),
    "awq": AwqConfig(bits=4),
    "gptq": GPTQConfig(bits=4),
    "gptq with zero points": GPTQConfig(bits=4, sym=False, group_size=64),
    "auto-round": AutoRoundConfig(),
}
NAMES = {
    "fp8": "fp8-block-128x128", "awq": "int4-group-128-zero-points", "gptq": "int4-group-128",
    "gptq with zero points": "int4-group-64-zero-points", "auto-round": "int4-group-128",
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_what_transformers_writes_is_read_back(name: str, tmp_path: Path) -> None:
    quantization = read(written(CLASSES[name], tmp_path))
    assert quantization.name == NAMES.get(name, "fp8-block-128x128")
    assert quantization.skips(K_PROJ) == (name == "fp8 with a list")


@pytest.mark.parametrize("method", AUTO_QUANTIZATION_CONFIG_MAPPING)
def test_every_class_of_transformers_is_read_back_or_refused_by_name(method: str, tmp_path: Path) -> None:
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING[method]
    try:
        raw = written(kind(bits=4) if method == "gptq" else kind(), tmp_path)
    except (ImportError, TypeError):  # it needs its own package, or an object of it
        raw = {"quant_method": method}
    if raw.get("quant_method") in METHODS and method != "compressed-tensors":
        assert read(raw).format.name in ("fp8", "int4")
        return
    key = "format" if method == "compressed-tensors" else "quant_method"  # its default config is not quantized
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.{key} is .*; allowed: '"):
        read(raw)


# --- compressed-tensors, by its own package

PRESETS = {
    "FP8_DYNAMIC": ("float-quantized", "fp8-channel"),
    "FP8_BLOCK": ("float-quantized", "fp8-block-128x128"),
    "W4A16": ("pack-quantized", "int4-group-128"),
    "W4A16_ASYM": ("pack-quantized", "int4-group-128-zero-points"),
}


def compressed(preset: str, kind: str, **changes: Any) -> dict[str, Any]:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, ignore=["lm_head", "re:.*k_proj"],
        quantization_status="compressed",
    )  # fmt: skip
    return {**config.model_dump(mode="json"), **changes}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_compressed_tensors_writes_is_read_back(preset: str) -> None:
    kind, name = PRESETS[preset]
    quantization = read(compressed(preset, kind, sparsity_config={"format": "dense"}, version="0.20.1"))
    assert quantization.name == name
    assert quantization.skips(K_PROJ) and not quantization.skips("model.layers.3.self_attn.q_proj")


@pytest.mark.parametrize("preset", ["W8A8", "FP8", "NVFP4", "MXFP4", "W8A16", "W4A8"])
def test_other_presets_of_compressed_tensors_are_refused(preset: str) -> None:
    for kind in ("float-quantized", "pack-quantized"):
        with pytest.raises(UnsupportedModelError, match=r"config_groups.group_0.* is .*; allowed: "):
            read(compressed(preset, kind))


def test_dtypes_of_scales_and_zero_points_are_told_by_the_files() -> None:
    raw = compressed("W4A16_ASYM", "pack-quantized")
    raw["config_groups"]["group_0"]["weights"] |= {"zp_dtype": "torch.int8", "scale_dtype": "torch.bfloat16"}
    assert read(raw).has_zero_points
    raw = compressed("FP8_DYNAMIC", "float-quantized")
    for part in ("weights", "input_activations"):
        raw["config_groups"]["group_0"][part] |= {"zp_dtype": "torch.float8_e4m3fn", "scale_dtype": None}
    assert read(raw).name == "fp8-channel"


# --- the tools' own files

GPTQMODEL = {
    "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "quant_method": "gptq",
    "checkpoint_format": "gptq", "sym": True, "pack_dtype": "int32", "hyb_act": False, "act_group_aware": True,
    "true_sequential": True, "damp_percent": 0.05, "damp_auto_increment": 0.01, "static_groups": False, "mse": 2.4,
    "offload_to_disk": True, "offload_to_disk_path": "./gptqmodel_offload", "pack_impl": "cpu", "rotation": None,
    "dynamic": {r"-:.*\.layers\.3\.self_attn\.k_proj.*": {}, "-:lm_head": {}},
    "meta": {"quantizer": ["gptqmodel:5.4.2"], "uri": "https://example.org", "mse": 2.4, "v2": False},
}  # fmt: skip
AUTOROUND = {
    "bits": 4, "group_size": 128, "sym": True, "data_type": "int", "quant_method": "auto-round", "iters": 200,
    "nsamples": 128, "seqlen": 2048, "batch_size": 8, "low_gpu_mem_usage": True, "enable_quanted_input": False,
    "packing_format": "auto_round:auto_gptq", "autoround_version": "0.9.2", "block_name_to_quantize": "model.layers",
    "act_bits": 16, "extra_config": {K_PROJ: {"bits": 16, "data_type": "fp"}, r".*mlp\.gate.*": {"bits": 16}},
}  # fmt: skip
AUTOAWQ = {"quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "GEMM", "backend": None}
MINIMAX = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head", K_PROJ]}


@pytest.mark.parametrize(
    ("raw", "name", "is_skipped"),
    [
        (GPTQMODEL, "int4-group-128", True),
        (AUTOROUND, "int4-group-128", True),
        ({**AUTOROUND, "packing_format": "auto_round:auto_awq", "sym": False}, "int4-group-128-zero-points", True),
        (AUTOAWQ, "int4-group-128-zero-points", False),
        (MINIMAX, "fp8-block-128x128", True),
    ],
    ids=["gptqmodel", "autoround", "autoround as awq", "autoawq", "fp8 with ignored_layers"],
)
def test_what_other_tools_write_is_read(raw: dict[str, Any], name: str, is_skipped: bool) -> None:
    quantization = read(raw)
    assert quantization.name == name
    assert quantization.skips(K_PROJ) == is_skipped
    assert not quantization.skips("model.layers.13.self_attn.k_proj")
    assert quantization.skips("model.layers.0.mlp.gate") == (raw.get("quant_method") == "auto-round")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {**GPTQMODEL, "dynamic": {r"+:.*down.*": {"bits": 8}}},
            "dynamic is .*; allowed: entries that begin with '-:'",
        ),
        ({**GPTQMODEL, "dynamic": {"-:(": {}}}, r"dynamic has '\(', which is no regular expression"),
        ({**GPTQMODEL, "rotation": "hadamard"}, "rotation is 'hadamard'; allowed: nothing"),
        ({**AUTOROUND, "extra_config": {K_PROJ: {"bits": 8}}}, "extra_config is .*; allowed: entries with 16 bits"),
        (
            {**AUTOROUND, "packing_format": "auto_round:mlx"},
            "packing_format is 'auto_round:mlx'; allowed: 'auto_round:g",
        ),
        ({**AUTOROUND, "act_bits": 8}, "act_bits is 8; allowed: 16"),
        ({**AUTOAWQ, "version": "GEMV"}, "version is 'GEMV'; allowed: 'gemm'"),
        ({**MINIMAX, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; allowed: 'fp8'"),
        ({**MINIMAX, "modules_to_convert": ["embed_tokens"]}, r"modules_to_convert is \['embed_tokens'\]"),
        ({**MINIMAX, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'; allowed: 'float'"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json: quantization_config.{message}"):
        read(raw)


def test_an_unknown_option_is_noted_and_refused_by_strict_config() -> None:
    raw = {**published_config("qwen3-8b"), "quantization_config": {**MINIMAX, "swizzle": 3, "shuffle": False}}
    config = model_config(raw)
    assert config.notes.unknown == ("quantization_config.swizzle",)
    with pytest.raises(UnsupportedModelError, match="does not know: quantization_config.swizzle"):
        config.notes.check_empty()
