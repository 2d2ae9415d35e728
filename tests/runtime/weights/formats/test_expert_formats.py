"""FP8 checkpoints of a mixture of experts, in blocks of 128 x 128: Hugging Face's tokens with the weights they mean."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.startup.live_reshard import move_params
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import model_config, named_model, published_config, read_model
from meshserve.sharding.mesh import make_mesh
from tests import checkpoints
from tests.runtime.model.test_moe_parity import _loaded, best_tokens
from tests.runtime.weights.formats import formats

PROMPT_LENGTHS = (1, 7, 33)
_METADATA = {"format": "pt"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with FP8 blocks, and one of the weights that they mean."""
    root = tmp_path_factory.mktemp("experts")
    sizes = {**checkpoints.TINY_EXPERTS, "moe_intermediate_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
    directories = tuple(checkpoints.save_checkpoint(root / name, **sizes) for name in ("fp8", "plain"))
    rng = np.random.default_rng(3)
    quantized, plain = {}, {}
    for name, tensor in load_file(directories[0] / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            stored = formats.fp8_block(rng, *tensor.shape)
            quantized |= {f"{module}.{part}": value.contiguous() for part, value in stored.tensors.items()}
            tensor = torch.tensor(stored.exact, dtype=torch.float32)
        else:
            quantized[name] = tensor
        plain[name] = tensor
    for directory, tensors in zip(directories, (quantized, plain), strict=True):
        save_file(tensors, directory / "model.safetensors", _METADATA)
    checkpoints.edit_config(directories[0], quantization_config=formats.FP8_BLOCK_CONFIG)
    return directories


@pytest.fixture(scope="module")
def generated(models: tuple[Path, Path]) -> list[list[int]]:
    """Prompts, followed by what Hugging Face generates."""
    prompts = checkpoints.random_prompts(PROMPT_LENGTHS, vocab_size=320)
    outputs = checkpoints.greedy(models[1], prompts, 12)
    return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]


# Two slices of 128 rows; eight of which two hold all rows, because blocks are not cut; and whole experts.
@pytest.mark.parametrize(("num_devices", "is_by_expert"), [(1, False), (2, False), (8, False), (4, True)])
def test_same_tokens_as_hugging_face(num_devices: int, is_by_expert: bool, models, generated) -> None:
    chosen = best_tokens(models[0], generated, num_devices, is_by_expert=is_by_expert)
    for text, best, length in zip(generated, chosen, PROMPT_LENGTHS, strict=True):
        assert best[length - 1 : -1] == text[length:]


def test_an_orbax_checkpoint_restores_on_any_mesh(models, tmp_path) -> None:
    convert(models[0], tmp_path, devices=jax.devices("cpu"))
    for num_devices, is_by_expert in ((1, False), (2, False), (8, False), (4, True)):
        found, expected = (
            _loaded(directory, num_devices=num_devices, is_by_expert=is_by_expert)
            for directory in (tmp_path, models[0])
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_moved_experts_are_those_that_loading_gives(models) -> None:
    """By a change of TP size and split, bit for bit."""
    config, dtype = read_model(models[0] / "config.json"), np.dtype("float32")
    splits = ((1, False), (2, False), (8, False), (4, True), (1, False))
    layouts = [model_layout(config, tp, expert_parallel=is_by_expert) for tp, is_by_expert in splits]
    for old, new in itertools.pairwise(layouts):
        mesh = make_mesh(new.num_shards)
        params = load_model(models[0], config, old, make_mesh(old.num_shards), dtype)[1]
        expected = load_model(models[0], config, new, mesh, dtype)[1]
        jax.tree.map(np.testing.assert_array_equal, move_params(config, params, old, new, mesh), expected)


def test_random_fp8_experts_have_the_usual_deviation(models) -> None:
    config = read_model(models[0] / "config.json")
    _, params = random_model(config, model_layout(config, 2), make_mesh(2), np.dtype("float32"))
    parts = params["layers"]["experts"]["gate_up"]
    values = np.asarray(parts["data"].get_value()).astype(np.float32) * float(parts["scale"].get_value().max())
    assert values.std() == pytest.approx(0.02, rel=0.05)


def test_what_has_no_whole_blocks_is_refused() -> None:
    for scheme, name in (("fp8-channel", "fp8-channel"), ("int4", "int4-group-128")):
        with pytest.raises(UnsupportedModelError, match=f"the weights are {name}; a model with experts may have"):
            named_model("qwen3-30b-a3b", scheme)
    raw = {**published_config("qwen3-30b-a3b"), "moe_intermediate_size": 200}
    with pytest.raises(UnsupportedModelError, match="moe_intermediate_size are 2048 and 200; .* multiples of 128"):
        model_config(raw, "fp8-block")
