"""Checkpoints in NVFP4 and MXFP4 as ModelOpt and compressed-tensors publish them: options, lists, KV scales."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file

from meshserve.kernels.linear.formats import FP4_MAX, FP8_MAX, MXFP4, NVFP4, SCALE, TENSOR_SCALE
from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model_files.config_file import quantization_config
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.formats.quantize import made_quantization, quantized, tensor_scale
from meshserve.runtime.weights.load import load_model, read_model_with_weights
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.test_formats import loaded
from tests.runtime.weights.formats.test_published_options import compressed, read

FLOAT32 = jnp.dtype("float32")
FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


def assert_same_weights(directory: Path, plain: Path, *sizes: int) -> None:
    for tp in sizes:
        expected = loaded(plain, tp)
        for parameter, values in loaded(directory, tp).items():
            np.testing.assert_array_equal(values, expected[parameter], err_msg=f"{parameter} at tp {tp}")


# --- ModelOpt's options

# As nvidia/Qwen3-8B-NVFP4 and its like have them, before and since ModelOpt also writes them to config.json.
QUANTIZATION_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
    },
}  # fmt: skip


def test_options_are_read_from_either_file(tmp_path: Path) -> None:
    flat = {**formats.modelopt_config("NVFP4", 16), "kv_cache_scheme": FP8_CACHE}
    for quantization in (read(flat), read(quantization_config(QUANTIZATION_FILE))):
        assert quantization.name == "nvfp4-group-16" and quantization.has_kv_scales
        assert quantization.skips("lm_head") and not quantization.skips("model.layers.0.mlp.gate_proj")
    checkpoint = formats.save(tmp_path / "model", "nvfp4", quantization_config=None)
    assert read_model(checkpoint.directory / "config.json").quantization is None
    details = {**QUANTIZATION_FILE["quantization"], "kv_cache_quant_algo": None}
    (checkpoint.directory / "hf_quant_config.json").write_text(json.dumps({"quantization": details}))
    plain = formats.save_plain(tmp_path / "plain", checkpoint)
    assert_same_weights(checkpoint.directory, plain, 1, 4)
    convert(checkpoint.directory, tmp_path / "orbax", dtype="float32", devices=jax.devices("cpu"))
    assert_same_weights(tmp_path / "orbax", plain, 2)


def test_lists_may_have_wildcards() -> None:
    """Any text where there is an asterisk, to the end of a name; without one, a module and those below it."""
    ignored = ["lm_head", "model.layers.*.mlp.gate", "model.layers.3.self_attn*", "*.o_proj", "model.layers.5.mlp"]
    quantization = read({**formats.modelopt_config("NVFP4", 16), "ignore": ignored})
    skipped = {
        "lm_head": True, "model.layers.0.mlp.gate": True, "model.layers.0.mlp.gate_proj": False,
        "model.layers.3.self_attn.q_proj": True, "model.layers.33.self_attn.q_proj": False,
        "model.layers.1.self_attn.o_proj": True, "model.layers.5.mlp.up_proj": True,
        "model.layers.5.self_attn.q_proj": False,
    }  # fmt: skip
    assert {module: quantization.skips(module) for module in skipped} == skipped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_algo": "NVFP4_AWQ"},
            "quant_algo is 'NVFP4_AWQ'; allowed: 'NVFP4', 'W4A16_NVFP4', 'MXFP4', 'mxfp4', 'MI",
        ),
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8'; allowed"),
        ({"group_size": 32}, "group_size is 32; allowed: 16, nothing"),
        ({"pre_quant_scale": True}, "pre_quant_scale is True; allowed: False, nothing"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'; it must be a list of module names"),
        ({"kv_cache_scheme": {**FP8_CACHE, "num_bits": 4}}, "kv_cache_scheme.num_bits is 4; allowed: 8"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is None; it must be an object"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
            "quantized_layers is .*; allowed: modules in NVFP4 or in MXFP4, and others in FP8",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W8A16"}}},
            "quantized_layers.a.quant_algo is 'W8A16'; allowed: 'NVFP4'",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json: quantization_config.{message}"):
        read({**formats.modelopt_config("NVFP4", 16), **changes})


def test_weights_that_are_published_for_16_bits_are_the_same() -> None:
    for algorithm in ("NVFP4", "W4A16_NVFP4"):
        assert read({**formats.modelopt_config(algorithm, 16), "group_size": 16}).name == "nvfp4-group-16"
    assert read(formats.modelopt_config("MXFP4", 32)).name == "mxfp4-group-32"


def fp8_tensor(rng: np.random.Generator, rows: int, columns: int) -> formats.Stored:
    data = formats.random_numbers(rng, rows, columns)
    scale = torch.tensor(0.001 * rng.uniform(1, 2), dtype=torch.float32)
    exact = data.to(torch.float32).numpy() * scale.numpy()
    return formats.Stored({"weight": data, "weight_scale": scale, "input_scale": 2 * scale}, exact.astype(np.float64))


def test_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPs in NVFP4, attention's outputs in FP8, which is dequantized, and the rest plain: listed or not."""
    nvfp4, layers = formats.nvfp4, range(formats.SHAPES["num_hidden_layers"])
    listed = {
        f"model.layers.{layer}.mlp.{part}_proj": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in layers
        for part in ("gate", "up", "down")
    } | {f"model.layers.{layer}.self_attn.o_proj": {"quant_algo": "FP8"} for layer in layers}

    def store(rng: np.random.Generator, rows: int, columns: int) -> formats.Stored:
        return (fp8_tensor if (rows, columns) == (256, 256) else nvfp4)(rng, rows, columns)

    monkeypatch.setitem(formats.FORMATS, "mixed", (store, {}, "bfloat16"))
    config = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed, "ignore": [],
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }  # fmt: skip
    checkpoint = formats.save(
        tmp_path / "model", "mixed", is_plain=lambda module: module not in listed, quantization_config=config
    )
    model = read_model(checkpoint.directory / "config.json")
    assert model.quantization is not None
    assert model.quantization.parameters == {"layers.mlp.gate_up", "layers.mlp.down"}
    plain = formats.save_plain(tmp_path / "plain", checkpoint)
    assert_same_weights(checkpoint.directory, plain, 1, 4)
    convert(checkpoint.directory, tmp_path / "orbax", dtype="float32", devices=jax.devices("cpu"))
    assert_same_weights(tmp_path / "orbax", plain, 2)


# --- scales of the cache


def with_cache_scales(directory: Path, scheme: Any, scales: tuple[float, float] | None) -> Path:
    """Writes a checkpoint of ModelOpt with scalars `k_proj.k_scale` and `v_proj.v_scale` in each layer."""
    config = {**formats.modelopt_config("NVFP4", 16), "kv_cache_scheme": scheme}
    checkpoint = formats.save(directory, "nvfp4", quantization_config=config)
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        for name, scale in zip("kv", scales or (), strict=False):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"] = torch.tensor(scale * (layer + 1))
    save_file(tensors, directory / "model.safetensors")
    return checkpoint.directory


def kv_scale(directory: Path, tp: int) -> np.ndarray | None:
    config = read_model_with_weights(directory / "config.json", directory)
    _, params = load_model(directory, config, model_layout(config, tp), make_mesh(tp), FLOAT32)
    attention = params["layers"]["attention"]
    return np.asarray(attention["kv_scale"].get_value()) if "kv_scale" in attention else None


def test_scales_of_the_cache_are_read(tmp_path: Path) -> None:
    directory = with_cache_scales(tmp_path / "model", FP8_CACHE, (0.25, 0.5))
    convert(directory, tmp_path / "orbax", devices=jax.devices("cpu"))
    for tp in (1, 8):
        for source in (directory, tmp_path / "orbax"):
            found = kv_scale(source, tp)
            assert found is not None
            np.testing.assert_array_equal(found, np.broadcast_to([[[0.25, 0.5]], [[0.5, 1.0]]], (2, max(4, tp), 2)))


def test_scales_that_the_files_lack_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = with_cache_scales(tmp_path / "model", FP8_CACHE, None)
    with caplog.at_level(logging.WARNING):
        assert kv_scale(directory, 2) is None
    assert "the weights hold no k_scale or v_scale" in caplog.text
    convert(directory, tmp_path / "orbax", devices=jax.devices("cpu"))
    assert kv_scale(tmp_path / "orbax", 2) is None


def test_scales_of_another_cache_are_named_and_not_read(tmp_path: Path) -> None:
    directory = with_cache_scales(tmp_path, "NVFP4", (0.25, 0.5))
    assert read_model(directory / "config.json").notes.unknown == ("quantization_config.kv_cache_scheme",)
    assert kv_scale(directory, 1) is None


def test_a_scale_of_mxfp4_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path, "mxfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][5, 3] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight_scale has scales that are no numbers"):
        loaded(checkpoint.directory, 1)


# --- the publishers' packages


def values_of(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    return (rng.standard_normal((rows, columns)) * 2.0 ** rng.uniform(-3, 0, (rows, 1)) * 0.05).astype(np.float32)


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16"])
def test_what_compressed_tensors_writes_is_read_back(preset: str) -> None:
    kind = preset.removesuffix("A16").lower()
    quantization = read(compressed(preset, f"{kind}-pack-quantized"))
    assert quantization.name == ("nvfp4-group-16" if kind == "nvfp4" else "mxfp4-group-32")
    assert quantization.skips("model.layers.3.self_attn.k_proj")


def scheme_of(preset: str) -> QuantizationScheme:
    return preset_name_to_scheme(preset, ["Linear"])


def test_nvfp4_is_that_of_compressed_tensors() -> None:
    """Its packed numbers and dequantized weights, and the numbers that it quantizes to with the same scales."""
    values = values_of(32, 128)
    made = quantized(values, made_quantization("nvfp4", [128], "float32"))
    divisor = np.float32(1) / tensor_scale(values)
    assert divisor == pytest.approx(FP4_MAX * FP8_MAX / np.abs(values).max())
    scale = torch.tensor(made.scale.astype(np.float32)).to(torch.float8_e4m3fn)
    state = {"weight": torch.tensor(values), "weight_scale": scale.to(torch.float32),
             "weight_global_scale": torch.tensor([divisor])}  # fmt: skip
    packed = NVFP4PackedCompressor.compress(state, scheme_of("NVFP4A16"))
    np.testing.assert_array_equal(packed["weight_packed"].numpy(), made.data)
    np.testing.assert_array_equal(packed["weight_scale"].view(torch.uint8).numpy(), made.scale.view(np.uint8))
    grids = {SCALE: np.repeat(made.scale.astype(np.float32), 16, axis=1), TENSOR_SCALE: tensor_scale(values)}
    found = NVFP4.elements(NVFP4.unpack(made.data), grids)
    exact = torch.tensor(found).to(torch.bfloat16)  # in which the package computes
    dequantized = NVFP4PackedCompressor.decompress(packed, scheme_of("NVFP4A16"))["weight"]
    torch.testing.assert_close(dequantized.to(torch.bfloat16), exact, rtol=2**-7, atol=0)


def test_mxfp4_is_that_of_compressed_tensors() -> None:
    values = values_of(32, 128)
    made = quantized(values, made_quantization("mxfp4", [128], "float32"))
    scale = torch.tensor(2.0 ** (made.scale.astype(np.float32) - 127))
    packed = MXFP4PackedCompressor.compress(
        {"weight": torch.tensor(values), "weight_scale": scale}, scheme_of("MXFP4A16")
    )
    np.testing.assert_array_equal(packed["weight_packed"].numpy(), made.data)
    np.testing.assert_array_equal(packed["weight_scale"].numpy(), made.scale)
    found = MXFP4.elements(MXFP4.unpack(made.data), {SCALE: np.repeat(made.scale.astype(np.float32), 32, axis=1)})
    dequantized = MXFP4PackedCompressor.decompress(packed, scheme_of("MXFP4A16"))["weight"]
    np.testing.assert_array_equal(dequantized.to(torch.float32).numpy(), found)


def test_both_are_those_of_modelopt() -> None:
    """Packed numbers and dequantized weights, bit for bit in float32. Its package is no dependency of the tests."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    values = torch.tensor(values_of(32, 128))
    packed, scale, tensor_scale = qtensor.NVFP4QTensor.quantize(values.clone(), 16)
    expected = packed.dequantize(torch.float32, scale=scale, double_scale=tensor_scale, block_sizes={-1: 16})
    data = packed._quantized_data.numpy()
    grids = {
        SCALE: np.repeat(scale.to(torch.float32).numpy(), 16, axis=1),
        TENSOR_SCALE: tensor_scale.numpy(),
    }
    np.testing.assert_array_equal(NVFP4.elements(NVFP4.unpack(data), grids), expected.numpy())
    packed, exponents = qtensor.MXFP4QTensor.quantize(values.clone(), 32)
    expected = packed.dequantize(torch.float32, scale=exponents, block_sizes={-1: 32})
    of_elements = np.repeat(exponents.numpy().reshape(32, 4).astype(np.float32), 32, axis=1)
    found = MXFP4.elements(MXFP4.unpack(packed._quantized_data.numpy()), {SCALE: of_elements})
    np.testing.assert_array_equal(found, expected.numpy())


def test_the_inverse_of_the_divisor_of_compressed_tensors_is_rounded(tmp_path: Path) -> None:
    """Weights differ from those divided by two roundings of float32. A number without an inverse is refused."""
    checkpoint = formats.save(tmp_path, "nvfp4-packed")
    path, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.o_proj.weight_global_scale"
    tensors = load_file(path)
    divisor, changed = float(tensors[name]), 93.3
    expected = np.float32(checkpoint.weights["model.layers.1.self_attn.o_proj.weight"] * divisor / np.float32(changed))
    save_file({**tensors, name: torch.tensor([changed])}, path)
    found = loaded(tmp_path, 1)["attention.out"][1]
    np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=0)
    assert (found != expected).any()
    save_file({**tensors, name: torch.tensor([0.0])}, path)
    with pytest.raises(CheckpointError, match="o_proj.weight_global_scale is 0.0; it must be positive"):
        loaded(tmp_path, 1)
