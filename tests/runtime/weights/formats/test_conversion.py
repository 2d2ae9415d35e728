"""Quantized weights that are made, stored with Orbax, restored at other TP sizes, and moved between TP sizes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from meshserve.kernels.linear import FP8, Format
from meshserve.kernels.linear.formats import SCALE, TENSOR_SCALE
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.model_files.quantization import SCHEMES, Quantization
from meshserve.runtime.startup.live_reshard import move_params
from meshserve.runtime.weights.convert import convert, verify
from meshserve.runtime.weights.formats.quantize import (
    head_quantization,
    made_quantization,
    quantized,
    tensor_scale,
)
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.mesh import make_mesh
from tests.checkpoints import save_checkpoint
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.test_kv_cache import with_kv_scales

BFLOAT16 = jnp.dtype("bfloat16")


def parameters(directory: Path, tp: int, quantize: str = "none", *, fp8_head: bool = False) -> dict[str, np.ndarray]:
    config = read_model(directory / "config.json", quantize, fp8_head=fp8_head)
    _, params = load_model(directory, config, model_layout(config, tp), make_mesh(tp), BFLOAT16)
    return flat(params)


def flat(params: nnx.State) -> dict[str, np.ndarray]:
    return {".".join(path): np.asarray(weight[...]) for path, weight in nnx.to_flat_state(params)}


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and array.shape == expected[name].shape, name
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unquantized bfloat16 checkpoint."""
    directory = tmp_path_factory.mktemp("plain")
    formats.save(directory, "fp8-block", is_plain=lambda module: True, quantization_config=None)
    return directory


def elements(format: Format, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    grids = {SCALE: scale.astype(np.float32), TENSOR_SCALE: np.float32(1)}
    return format.elements(format.unpack(data).astype(np.float32), grids)


def exact_values(scheme: str) -> tuple[np.ndarray, Quantization]:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((200, 256)) * 2.0 ** rng.uniform(-4, 0, (200, 1))).astype(np.float32)
    return values, made_quantization(scheme, [256], "float32")


@pytest.mark.parametrize(
    ("scheme", "bound"), [("fp8-block", 0.03), ("fp8-channel", 0.03), ("int4", 0.13), ("nvfp4", 0.12), ("mxfp4", 0.14)]
)
def test_made_weights_are_near_the_originals(scheme: str, bound: float) -> None:
    """A float with 3 bits of fraction has a relative error of at most 1/16, a 4-bit integer 1/15 of the largest."""
    values, quantization = exact_values(scheme)
    found = quantized(values, quantization)
    rows, columns = quantization.scale.block
    scale = np.repeat(np.repeat(found.scale, rows, 0)[:200], columns or 256, 1)
    if scheme == "nvfp4":
        scale = scale.astype(np.float32) * tensor_scale(values)
    error = elements(quantization.format, found.data, scale) - values
    assert np.linalg.norm(error) < bound * np.linalg.norm(values)
    if scheme == "fp8-block":
        normal = np.abs(values) > 2.0**-6 * scale
        assert (np.abs(error)[normal] <= np.abs(values)[normal] / 16 * 1.0001).all()
        assert np.abs(found.data[:128, :128].astype(np.float32)).max() == 448.0


def test_blocks_of_zeros_are_zeros() -> None:
    for scheme in SCHEMES:
        _, quantization = exact_values(scheme)
        found = quantized(np.zeros((128, 256), np.float32), quantization)
        assert np.isfinite(found.scale.astype(np.float32)).all() and (found.scale > 0).all()
        assert not elements(quantization.format, found.data, np.float32(1)).any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_made_when_loaded_or_converted_is_the_same(scheme: str, plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "orbax", quantize=scheme, devices=jax.devices("cpu"))
    raw = json.loads((tmp_path / "orbax" / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == ("fp8" if scheme == "fp8-block" else "compressed-tensors")
    assert verify(tmp_path / "orbax") > 0
    for tp in (1, 8):
        found = parameters(plain, tp, scheme)
        assert found["layers.mlp.down.data"].dtype == (FP8 if scheme.startswith("fp8") else np.uint8)
        assert_same_bits(parameters(tmp_path / "orbax", tp), found)


@pytest.mark.parametrize("name", ["fp8-block", "packed-64-zero", "gptq", "nvfp4", "nvfp4-packed", "mxfp4"])
def test_published_formats_are_stored_and_restored(name: str, tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path / "model", name)
    convert(checkpoint.directory, tmp_path / "orbax", devices=jax.devices("cpu"))
    for tp in (2, 8):
        assert_same_bits(parameters(tmp_path / "orbax", tp), parameters(checkpoint.directory, tp))


def test_an_unquantized_orbax_checkpoint_is_quantized_when_loaded(plain: Path, tmp_path: Path) -> None:
    """Rows of a scale are those of a head there, so that only matrices that are not fused are the same."""
    convert(plain, tmp_path / "orbax", devices=jax.devices("cpu"))
    found, expected = parameters(tmp_path / "orbax", 4, "fp8-channel"), parameters(plain, 4, "fp8-channel")
    assert_same_bits(found, expected)
    found, expected = parameters(tmp_path / "orbax", 4, "fp8-block"), parameters(plain, 4, "fp8-block")
    assert found["layers.attention.qkv.scale"].shape == expected["layers.attention.qkv.scale"].shape
    assert found["layers.mlp.down.data"].tobytes() == expected["layers.mlp.down.data"].tobytes()


@pytest.mark.parametrize("name", ["fp8-block", "packed-64-zero", "kv-scales", "nvfp4", "mxfp4"])
def test_a_change_of_tp_moves_every_part(name: str, tmp_path: Path) -> None:
    """From 1 to 8 scales are needed for smaller rectangles, from 8 to 2 for larger ones."""
    directory = tmp_path / "model"
    checkpoint = with_kv_scales(directory)[0] if name == "kv-scales" else formats.save(directory, name)
    config = read_model(checkpoint.directory / "config.json")
    old = model_layout(config, 1)
    _, params = load_model(directory, config, old, make_mesh(1), BFLOAT16)
    for tp in (8, 2):
        layout = model_layout(config, tp)
        params = move_params(config, params, old, layout, make_mesh(tp))
        assert_same_bits(flat(params), parameters(directory, tp))
        old = layout


@pytest.mark.parametrize("scheme", ["none", "fp8-block", "int4"])
def test_a_tied_head_is_a_copy_of_the_embedding(scheme: str, tmp_path: Path) -> None:
    """Made from either format, with padded shards, and moved between TP sizes. The embedding stays as it is."""
    plain, orbax = tmp_path / "model", tmp_path / "orbax"
    save_checkpoint(plain, vocab_size=333, hidden_size=64, num_hidden_layers=2)
    convert(plain, orbax, quantize=scheme, devices=jax.devices("cpu"))
    assert not list((orbax / "weights").glob("head*"))
    stored = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    embedding, head = stored.astype(BFLOAT16), quantized(stored, head_quantization())
    config = read_model(plain / "config.json", scheme, fp8_head=True)
    for tp in (1, 4):
        found = parameters(plain, tp, scheme, fp8_head=True)
        for name, array in (("embedding", embedding), ("head.data", head.data), ("head.scale", head.scale)):
            assert found[name].dtype == array.dtype and found[name][:333].tobytes() == array.tobytes(), name
        assert_same_bits(parameters(orbax, tp, fp8_head=True), found)
    layouts, meshes = [model_layout(config, tp) for tp in (1, 4)], [make_mesh(tp) for tp in (1, 4)]
    _, params = load_model(plain, config, layouts[0], meshes[0], BFLOAT16)
    assert_same_bits(flat(move_params(config, params, *layouts, meshes[1])), found)
    _, params = random_model(config, layouts[1], meshes[1], BFLOAT16)
    assert {name: (a.dtype, a.shape) for name, a in flat(params).items()} == {
        name: (a.dtype, a.shape) for name, a in found.items()
    }


def test_what_cannot_be_quantized_is_named(plain: Path, tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path / "quantized", "awq", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="--quantize int4: the model is already quantized"):
        read_model(checkpoint.directory / "config.json", "int4")
    formats.save(
        tmp_path / "odd", "fp8-block", is_plain=lambda _: True, quantization_config=None, hidden_size=208,
        num_hidden_layers=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="multiples of 32; this model has 208, 256, 384. Use fp8-block"):
        read_model(tmp_path / "odd" / "config.json", "int4")
    with pytest.raises(ConfigError, match="quantize is 'fp5'; allowed are fp8-block"):
        read_model(plain / "config.json", "fp5")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_weights_are_quantized_too(scheme: str, plain: Path) -> None:
    config = read_model(plain / "config.json", scheme)
    _, params = random_model(config, model_layout(config, 2), make_mesh(2), BFLOAT16)
    found = flat(params)
    assert {name: array.dtype for name, array in found.items()} == {
        name: array.dtype for name, array in parameters(plain, 2, scheme).items()
    }
    assert config.quantization is not None
    format, data = config.quantization.format, found["layers.mlp.gate_up.data"]
    grids = {
        grid.part: found[f"layers.mlp.gate_up.{grid.part}"].astype(np.float32) for grid in config.quantization.grids
    }
    values = format.elements(
        format.unpack(data).astype(np.float32), {part: grid[0, 0, 0, 0] for part, grid in grids.items()}
    )
    assert 0.015 < values.std() < 0.025 and all((grid == grid[0, 0, 0, 0]).all() for grid in grids.values())
