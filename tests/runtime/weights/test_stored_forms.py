"""Checkpoints in forms that writers other than the publisher give them: they are read, or refused by name."""

import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model, read_model_with_weights
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh
from tests import checkpoints
from tests.runtime.weights.formats import formats

EXPERTS = {**checkpoints.TINY_EXPERTS, "moe_intermediate_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def loaded(directory: Path, num_devices: int = 1, *, is_by_expert: bool = False) -> dict[str, np.ndarray]:
    config = read_model_with_weights(directory / "config.json", directory)
    layout = model_layout(config, num_devices, expert_parallel=is_by_expert)
    _, params = load_model(directory, config, layout, make_mesh(num_devices), np.dtype("float32"))
    return {".".join(map(str, path)): np.asarray(weight[...]) for path, weight in nnx.to_flat_state(params)}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def rewritten(directory: Path, target: Path, change) -> Path:
    """Copies a checkpoint with other tensors: `change` takes a dictionary of them and edits it."""
    target.mkdir()
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


def fuse(tensors: dict[str, torch.Tensor]) -> None:
    """Stores the experts of each layer as transformers holds them, with the scales of FP8 beside them."""
    for ending in ("", "_scale_inv"):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts."

            def taken(name: str, prefix: str = prefix, ending: str = ending) -> list[torch.Tensor]:
                return [tensors.pop(f"{prefix}{expert}.{name}.weight{ending}") for expert in range(8)]

            if f"{prefix}0.gate_proj.weight{ending}" in tensors:
                pairs = zip(taken("gate_proj"), taken("up_proj"), strict=True)
                tensors[f"{prefix}gate_up_proj{ending}"] = torch.stack([torch.cat(pair) for pair in pairs])
                tensors[f"{prefix}down_proj{ending}"] = torch.stack(taken("down_proj"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("plain"), **EXPERTS)


@pytest.fixture(scope="module")
def fp8(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with FP8 experts except for `EXPERT`, and one of the weights that they mean."""
    root, rng = tmp_path_factory.mktemp("fp8"), np.random.default_rng(7)
    exact: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight") and not name.startswith(EXPERT)]:
            stored = formats.fp8_block(rng, *tensors[name].shape)
            exact[name] = torch.tensor(stored.exact, dtype=torch.float32)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": value for part, value in stored.tensors.items()}

    quantized = rewritten(plain, root / "quantized", quantize)
    checkpoints.edit_config(quantized, quantization_config=formats.FP8_BLOCK_CONFIG)
    return quantized, rewritten(plain, root / "exact", lambda tensors: tensors.update(exact))


def test_fused_experts_as_transformers_writes_them(plain: Path, tmp_path: Path) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(plain)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert names["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 512, 128)
    for num_devices, is_by_expert in ((1, False), (4, False), (4, True)):
        split = {"num_devices": num_devices, "is_by_expert": is_by_expert}
        assert_same(loaded(tmp_path, **split), loaded(plain, **split))


def test_fused_fp8_experts(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    def complete(tensors: dict[str, torch.Tensor]) -> None:
        rng = np.random.default_rng(1)
        stored = formats.fp8_block(rng, 128, 256)
        tensors |= {f"{EXPERT}.{part}": value for part, value in stored.tensors.items()}

    apart = rewritten(fp8[0], tmp_path / "apart", complete)
    assert_same(loaded(rewritten(apart, tmp_path / "fused", fuse), 2), loaded(apart, 2))


def test_fused_experts_of_another_number_are_refused(plain: Path, tmp_path: Path) -> None:
    fused = rewritten(plain, tmp_path / "fused", fuse)
    name = "model.layers.0.mlp.experts.down_proj"
    wrong = rewritten(fused, tmp_path / "wrong", lambda tensors: tensors.update({name: tensors[name][:7]}))
    with pytest.raises(CheckpointError, match=rf"{name} is \(7, 128, 256\); it must have 8 matrices"):
        loaded(wrong)


def test_tensors_that_are_no_weights_are_ignored_by_name(plain: Path, tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "v_head.summary.weight")
    found = rewritten(plain, tmp_path / "more", lambda tensors: tensors.update({name: torch.ones(8) for name in names}))
    assert_same(loaded(found), loaded(plain))
    found = rewritten(plain, tmp_path / "other", lambda tensors: tensors.update({"head.v_head": torch.ones(8)}))
    with pytest.raises(CheckpointError, match="1 not part of this model: head.v_head"):
        loaded(found)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_single_expert_that_is_not_quantized(
    is_listed: bool, fp8: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its projection is dequantized in all layers; others stay quantized, also in an Orbax checkpoint."""
    directory = rewritten(fp8[0], tmp_path / "model", lambda tensors: None)
    skipped = [*formats.FP8_BLOCK_CONFIG["modules_to_not_convert"], *([EXPERT] if is_listed else [])]
    checkpoints.edit_config(
        directory, quantization_config={**formats.FP8_BLOCK_CONFIG, "modules_to_not_convert": skipped}
    )
    with caplog.at_level(logging.WARNING):
        found, exact = loaded(directory, 2), loaded(fp8[1], 2)
    assert f"experts.down is dequantized in all layers, because the checkpoint leaves {EXPERT}" in caplog.text
    assert ("1 modules that quantization_config of config.json does not leave out" in caplog.text) != is_listed
    np.testing.assert_array_equal(found["layers.experts.down"], exact["layers.experts.down"])
    assert "layers.experts.gate_up.data" in found
    convert(directory, tmp_path / "orbax", dtype="float32", devices=jax.devices("cpu"))
    assert_same(loaded(tmp_path / "orbax", 2), found)


def test_a_head_that_transformers_left_out_without_saying_so(tmp_path: Path) -> None:
    """`FineGrainedFP8Config` with its default list, which is null, does not convert the output head."""
    config = {**formats.FP8_BLOCK_CONFIG, "modules_to_not_convert": None}
    unlisted = formats.save(tmp_path / "unlisted", "fp8-block", quantization_config=config)
    listed = formats.save(tmp_path / "listed", "fp8-block")
    assert_same(loaded(unlisted.directory), loaded(listed.directory))
    convert(unlisted.directory, tmp_path / "orbax", devices=jax.devices("cpu"))
    stored = json.loads((tmp_path / "orbax" / "config.json").read_text())["quantization_config"]
    assert stored["modules_to_not_convert"] == ["lm_head"]
