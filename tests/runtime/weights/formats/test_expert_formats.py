"""Quantized checkpoints of a mixture of experts: Hugging Face's tokens with the weights that they mean."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from meshserve.kernels.linear import QuantizedMatrix
from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model.declaration import matrix_of
from meshserve.runtime.startup.live_reshard import move_params
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import model_config, named_model, published_config, read_model
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh
from tests import checkpoints
from tests.runtime.model.test_moe_parity import _loaded, best_tokens
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.test_formats import dequantized_at_once

PROMPT_LENGTHS = (1, 7, 33)
# An expert of 256 rows: split by tensor over 8, slices of 32 are parts of a group, and blocks of FP8 are not cut.
SIZES = {**checkpoints.TINY_EXPERTS, "moe_intermediate_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
NAMES = ("fp8-block", "packed-32", "packed-64-zero", "packed-128", "awq", "gptq", "gptq-zero", "gptq-v2-32",
         "auto-round", "auto-round-awq", "nvfp4", "nvfp4-packed", "mxfp4", "mxfp4-packed")  # fmt: skip
SPLITS = ((1, False), (2, False), (4, False), (8, False), (2, True), (4, True))
FLOAT32 = np.dtype("float32")
_METADATA = {"format": "pt"}


def save(root: Path, name: str, **sizes: Any) -> tuple[Path, Path]:
    """Writes a checkpoint in a format, and one of the weights that it means, in float32."""
    directories = tuple(checkpoints.save_checkpoint(root / part, **SIZES | sizes) for part in ("quantized", "plain"))
    store, quantization, _ = formats.FORMATS[name]
    rng = np.random.default_rng(3)
    quantized, plain = {}, {}
    for tensor_name, tensor in load_file(directories[0] / "model.safetensors").items():
        module = tensor_name.removesuffix(".weight")
        if module.endswith("_proj"):
            stored = store(rng, *tensor.shape)
            quantized |= {f"{module}.{part}": value.contiguous() for part, value in stored.tensors.items()}
            tensor = torch.tensor(stored.exact, dtype=torch.float32)
        else:
            quantized[tensor_name] = tensor
        plain[tensor_name] = tensor
    for directory, tensors in zip(directories, (quantized, plain), strict=True):
        save_file(tensors, directory / "model.safetensors", _METADATA)
    checkpoints.edit_config(directories[0], quantization_config=quantization)
    return directories


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For each format, a checkpoint in it, and one of the weights that it means."""
    root = tmp_path_factory.mktemp("experts")
    return {name: save(root / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def generated(models: dict[str, tuple[Path, Path]]) -> dict[str, list[list[int]]]:
    """Prompts, followed by what Hugging Face generates."""
    prompts, found = checkpoints.random_prompts(PROMPT_LENGTHS, vocab_size=320), {}
    for name, (_, plain) in models.items():
        outputs = checkpoints.greedy(plain, prompts, 12)
        found[name] = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return found


def loaded(directory: Path, num_devices: int, is_by_expert: bool) -> nnx.State:
    return _loaded(directory, num_devices=num_devices, is_by_expert=is_by_expert)


def experts_of(params: nnx.State) -> dict[str, np.ndarray]:
    """Returns the experts' matrices of all layers, dequantized."""
    found = {}
    for name in ("gate_up", "down"):
        matrix = matrix_of(params["layers"]["experts"][name])
        found[name] = np.asarray(dequantized_at_once(matrix) if isinstance(matrix, QuantizedMatrix) else matrix)
    return found


# FP8 has two slices of 128 rows; of eight, two hold all rows.
TOKEN_SPLITS = {
    "fp8-block": ((1, False), (2, False), (8, False), (4, True)),
    **dict.fromkeys(("packed-128", "nvfp4"), SPLITS),
    "mxfp4-packed": ((1, False), (2, False), (4, False), (2, True)),
}


@pytest.mark.parametrize(
    ("name", "num_devices", "is_by_expert"),
    [(name, *split) for name in NAMES for split in TOKEN_SPLITS.get(name, ((4, False), (2, True)))],
)
def test_same_tokens_as_hugging_face(name: str, num_devices: int, is_by_expert: bool, models, generated) -> None:
    chosen = best_tokens(models[name][0], generated[name], num_devices, is_by_expert=is_by_expert)
    for text, best, length in zip(generated[name], chosen, PROMPT_LENGTHS, strict=True):
        assert best[length - 1 : -1] == text[length:]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp8-block"])
def test_weights_are_those_that_the_format_means(name: str, models) -> None:
    """Bit for bit in float32, also where a slice of an expert has a part of a group. They stay quantized."""
    quantized, plain = models[name]
    for split in SPLITS:
        params, expected = loaded(quantized, *split), experts_of(loaded(plain, *split))
        assert isinstance(matrix_of(params["layers"]["experts"]["down"]), QuantizedMatrix)
        for matrix, values in experts_of(params).items():
            assert expected[matrix].any()
            np.testing.assert_array_equal(values, expected[matrix], err_msg=f"{matrix} at {split}")


def test_a_slice_has_scales_for_parts_of_groups(models) -> None:
    """Of 256 columns in groups of 128, at TP 1, 2 and 8; a group of 32 is not cut."""
    for name, numbers in (("packed-128", (2, 1, 1)), ("packed-32", (8, 4, 1))):
        for tp, number in zip((1, 2, 8), numbers, strict=True):
            scale = loaded(models[name][0], tp, False)["layers"]["experts"]["down"]["scale"].get_value()
            assert scale.shape == (2, 8 * tp, 128, number)


@pytest.mark.parametrize("name", ["fp8-block", "packed-128", "packed-64-zero", "awq", "nvfp4", "mxfp4-packed"])
def test_an_orbax_checkpoint_restores_on_any_mesh(name: str, models, tmp_path) -> None:
    convert(models[name][0], tmp_path, devices=jax.devices("cpu"))
    for split in ((1, False), (2, False), (8, False), (4, True)):
        jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path, *split), loaded(models[name][0], *split))


def assert_moved_as_loaded(directory: Path, splits: tuple[tuple[int, bool], ...]) -> None:
    config = read_model(directory / "config.json")
    layouts = [model_layout(config, tp, expert_parallel=is_by_expert) for tp, is_by_expert in splits]
    for old, new in itertools.pairwise(layouts):
        mesh = make_mesh(new.num_shards)
        params = load_model(directory, config, old, make_mesh(old.num_shards), FLOAT32)[1]
        expected = load_model(directory, config, new, mesh, FLOAT32)[1]
        jax.tree.map(np.testing.assert_array_equal, move_params(config, params, old, new, mesh), expected)


@pytest.mark.parametrize("name", ["fp8-block", "packed-128", "packed-64-zero", "nvfp4", "mxfp4"])
def test_moved_experts_are_those_that_loading_gives(name: str, models) -> None:
    """By a change of TP size and split, bit for bit."""
    assert_moved_as_loaded(models[name][0], ((1, False), (2, False), (8, False), (4, True), (1, False)))


def test_moved_slices_may_begin_within_a_group(tmp_path) -> None:
    """Slices of 96 and 64 rows in groups of 64: the third of three begins in the middle of the second of two."""
    directory, _ = save(
        tmp_path, "packed-64-zero", moe_intermediate_size=192, num_attention_heads=12, num_key_value_heads=6
    )
    assert_moved_as_loaded(directory, ((2, False), (3, False), (2, False), (6, False), (1, False)))


@pytest.mark.parametrize(
    ("name", "tolerance"), [("fp8-block", 0.05), ("packed-128", 0.05), ("nvfp4", 0.05), ("mxfp4", 0.3)]
)
def test_random_experts_have_the_usual_deviation(name: str, tolerance: float, models) -> None:
    config = read_model(models[name][0] / "config.json")
    _, params = random_model(config, model_layout(config, 2), make_mesh(2), FLOAT32)
    assert experts_of(params)["gate_up"].std() == pytest.approx(0.02, rel=tolerance)


@pytest.mark.parametrize(
    ("scheme", "quantized_name"), [("int4", "int4-group-128"), ("nvfp4", "nvfp4-group-16"), ("mxfp4", "mxfp4-group-32")]
)
def test_made_when_loaded_or_converted_is_the_same(scheme: str, quantized_name: str, models, tmp_path) -> None:
    """With `--quantize`, near the unquantized weights; by Orbax too, whose layers are stored as they are held."""
    plain = models["packed-128"][1]
    convert(plain, tmp_path, quantize=scheme, devices=jax.devices("cpu"))
    expected = experts_of(loaded(plain, 4, False))
    made = read_model(plain / "config.json", scheme)
    assert made.quantization_name == quantized_name
    params = load_model(plain, made, model_layout(made, 4), make_mesh(4), FLOAT32)[1]
    jax.tree.map(np.testing.assert_array_equal, params, loaded(tmp_path, 4, False))
    for name, values in experts_of(params).items():
        error = np.linalg.norm(values - expected[name]) / np.linalg.norm(expected[name])
        assert 0.01 < error < 0.13, name


def test_the_order_of_activations_is_refused(models, tmp_path) -> None:
    """A GPTQ checkpoint with `desc_act` whose columns are in the order of their activations."""
    directory, _ = save(tmp_path, "gptq")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, directory / "model.safetensors", _METADATA)
    with pytest.raises(CheckpointError, match=f"{name} orders columns by activation"):
        loaded(directory, 1, False)


def test_groups_of_a_size_by_name() -> None:
    """They divide the experts' intermediate size; that of dense layers counts only where a model has some."""
    assert named_model("qwen3-30b-a3b", "int4").quantization_name == "int4-group-128"
    raw = published_config("qwen3-coder-30b-a3b")
    assert raw["intermediate_size"] % 128 and model_config(raw, "int4").quantization_name == "int4-group-128"
    assert model_config({**raw, "mlp_only_layers": [0]}, "int4").quantization_name == "int4-group-32"


def test_what_has_no_whole_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="the weights are fp8-channel; those of a model with experts"):
        named_model("qwen3-30b-a3b", "fp8-channel")
    raw = {**published_config("qwen3-30b-a3b"), "moe_intermediate_size": 200}
    with pytest.raises(UnsupportedModelError, match="moe_intermediate_size are 2048 and 200; .* multiples of 128"):
        model_config(raw, "fp8-block")
