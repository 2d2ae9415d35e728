"""Checkpoints of every published format, at every TP size: the weights on the devices, and the logits they give."""

import dataclasses
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshserve.kernels.linear import QuantizedMatrix, dequantized
from meshserve.kernels.linear.cases import rounded_activations
from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model.declaration import matrix_of
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model, open_weights
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.exact_model import exact_logits, our_logits, relative_error

FLOAT32 = jnp.dtype("float32")
TOKEN_IDS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 40)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, formats.Checkpoint]:
    root = tmp_path_factory.mktemp("formats")
    return {name: formats.save(root / name, name, seed=seed) for seed, name in enumerate(formats.FORMATS)}


dequantized_at_once = jax.jit(dequantized)  # one program for a shape instead of one for each operation


def loaded(directory: Path, tp: int, *, quantize: str = "none", is_plain: bool = False) -> dict[str, np.ndarray]:
    """Returns every parameter at a TP size, dequantized; with `is_plain` while it is loaded."""
    config = read_model(directory / "config.json", quantize)
    if is_plain:
        assert config.quantization is not None
        config = dataclasses.replace(config, quantization=config.quantization.held_plain())
    _, params = load_model(directory, config, model_layout(config, tp), make_mesh(tp), FLOAT32)
    layers = params["layers"]
    found = {
        "attention.qkv": layers["attention"]["qkv"], "attention.out": layers["attention"]["out"],
        "mlp.gate_up": layers["mlp"]["gate_up"], "mlp.down": layers["mlp"]["down"],
        "attention_norm": layers["attention_norm"], "embedding": params["embedding"], "head": params["head"],
    }  # fmt: skip
    matrices = {name: matrix_of(state) for name, state in found.items()}
    return {
        name: np.asarray(dequantized_at_once(matrix) if isinstance(matrix, QuantizedMatrix) else matrix)
        for name, matrix in matrices.items()
    }


@pytest.mark.parametrize("name", formats.FORMATS)
def test_weights_are_those_of_the_dequantized_checkpoint(
    name: str, checkpoints: dict[str, formats.Checkpoint], tmp_path: Path
) -> None:
    """Bit for bit in float32, at TP sizes that cut blocks and repeat KV heads."""
    plain = formats.save_plain(tmp_path / "plain", checkpoints[name])
    for tp in (1, 2, 8):
        expected = loaded(plain, tp)
        for parameter, values in loaded(checkpoints[name].directory, tp).items():
            np.testing.assert_array_equal(values, expected[parameter], err_msg=f"{parameter} at tp {tp}")


@pytest.mark.parametrize("name", ["fp8-block", "fp8-channel", "packed-64-zero", "awq", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("is_orbax", [False, True])
def test_weights_that_are_dequantized_while_they_are_loaded_are_the_same(
    name: str, is_orbax: bool, checkpoints: dict[str, formats.Checkpoint], tmp_path: Path
) -> None:
    directory = checkpoints[name].directory
    if is_orbax:
        convert(directory, tmp_path / "orbax", dtype="float32", devices=jax.devices("cpu"))
        directory = tmp_path / "orbax"
    for tp in (1, 8):
        expected = loaded(directory, tp)
        for parameter, values in loaded(directory, tp, is_plain=True).items():
            np.testing.assert_array_equal(values, expected[parameter], err_msg=f"{parameter} at tp {tp}")


@pytest.mark.parametrize("quantize", ["fp8-block", "fp8-channel", "int4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("is_orbax", [False, True])
def test_weights_that_are_quantized_and_dequantized_while_they_are_loaded_are_the_same(
    quantize: str, is_orbax: bool, checkpoints: dict[str, formats.Checkpoint], tmp_path: Path
) -> None:
    directory = formats.save_plain(tmp_path / "plain", checkpoints["fp8-block"])
    if is_orbax:
        convert(directory, tmp_path / "orbax", dtype="float32", devices=jax.devices("cpu"))
        directory = tmp_path / "orbax"
    for tp in (1, 8):
        expected = loaded(directory, tp, quantize=quantize)
        for parameter, values in loaded(directory, tp, quantize=quantize, is_plain=True).items():
            np.testing.assert_array_equal(values, expected[parameter], err_msg=f"{parameter} at tp {tp}")


@pytest.mark.parametrize(
    ("name", "tp", "dtype", "bound"),
    [
        *(("fp8-block", tp, "float32", 1e-5) for tp in (1, 2, 4, 8)),
        *((name, 8, "float32", 1e-5) for name in ("fp8-channel", "packed-64-zero", "awq")),
        *((name, tp, "float32", 1e-5) for name, tp in (("nvfp4", 1), ("nvfp4-packed", 4), ("mxfp4", 2))),
        *((name, 2, "bfloat16", 0.03) for name in ("fp8-block", "gptq-zero")),
    ],
)
def test_logits_are_the_float64_computation(
    name: str, tp: int, dtype: str, bound: float, checkpoints: dict[str, formats.Checkpoint]
) -> None:
    checkpoint = checkpoints[name]
    expected = exact_logits(checkpoint.weights, checkpoint.raw, TOKEN_IDS)
    assert relative_error(our_logits(checkpoint.directory, TOKEN_IDS, tp, dtype=dtype), expected) < bound


@pytest.mark.parametrize("name", ["fp8-block", "fp8-channel"])
def test_logits_with_rounded_activations(name: str, tmp_path: Path) -> None:
    """The published rounding of activations, in groups of 128 columns or whole tokens, within a shard.

    An activation at the border of two 8-bit numbers may be rounded to either, which shows in the later tokens of the
    prompt. Hence the median of the tokens' errors is bounded: it is thousands of times that without the rounding.
    """
    checkpoint = formats.save(tmp_path, name, num_hidden_layers=1)
    token_ids = TOKEN_IDS[:12]
    unrounded = exact_logits(checkpoint.weights, checkpoint.raw, token_ids)
    for tp in (1, 2, 4, 8):

        def rounded(x: np.ndarray, projection: str, tp: int = tp) -> np.ndarray:
            local = x.shape[1] // tp if projection in ("o_proj", "down_proj") else x.shape[1]
            return rounded_activations(x, local if name == "fp8-channel" else math.gcd(128, local))

        expected = exact_logits(checkpoint.weights, checkpoint.raw, token_ids, rounded)
        found = our_logits(checkpoint.directory, token_ids, tp, linear="xla_fp8")
        assert np.median([relative_error(*rows) for rows in zip(found, expected, strict=True)]) < 1e-5
        assert min(relative_error(*rows) for rows in zip(found, unrounded, strict=True)) > 0.01


def test_a_projection_that_some_layers_keep_is_served_unquantized(tmp_path: Path) -> None:
    """Its quantized tensors are dequantized when they are loaded; other projections stay quantized."""
    skipped = ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"]
    config = {**formats.FP8_BLOCK_CONFIG, "modules_to_not_convert": skipped}
    checkpoint = formats.save(
        tmp_path / "model", "fp8-block", is_plain=lambda module: module in skipped, quantization_config=config
    )
    model = read_model(checkpoint.directory / "config.json")
    assert model.quantization is not None
    assert model.quantization.parameters == {"layers.attention.out", "layers.mlp.gate_up"}
    plain = formats.save_plain(tmp_path / "plain", checkpoint)
    for tp in (1, 4):
        expected = loaded(plain, tp)
        for parameter, values in loaded(checkpoint.directory, tp).items():
            np.testing.assert_array_equal(values, expected[parameter], err_msg=parameter)


def test_int4_projections_can_be_served_unquantized(tmp_path: Path) -> None:
    config = {**formats.awq_config(128), "modules_to_not_convert": ["layers.0.mlp"]}
    checkpoint = formats.save(
        tmp_path / "model", "awq", is_plain=lambda module: "layers.0.mlp" in module, quantization_config=config
    )
    expected = loaded(formats.save_plain(tmp_path / "plain", checkpoint), 2)
    for parameter, values in loaded(checkpoint.directory, 2).items():
        np.testing.assert_array_equal(values, expected[parameter], err_msg=parameter)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8-block", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; allowed: 'fp8', 'compr"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt is 'e5m2'; allowed: 'e4m3'"),
        ("fp8-block", {"activation_scheme": "static"}, "activation_scheme is 'static'; allowed: 'dynamic'"),
        ("fp8-block", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; allowed: \[128, 128\]"),
        ("fp8-block", {"weight_block_size": None}, "weight_block_size is None"),
        ("fp8-block", {"rotation": "hadamard"}, "rotation is 'hadamard'; allowed: nothing"),
        ("fp8-block", {"modules_to_not_convert": "lm_head"}, "must be a list of module names"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; allowed: 'gemm'"),
        ("awq", {"bits": 8}, "bits is 8; allowed: 4"),
        ("awq", {"zero_point": False}, "zero_point is False; allowed: True"),
        ("awq", {"group_size": -1}, "group_size is -1; allowed: 32, 64, 128"),
        ("gptq", {"bits": 3}, "bits is 3; allowed: 4"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; allowed: 'gptq', 'gptq_v2'"),
        ("gptq", {"lm_head": True}, "lm_head is True; allowed: False"),
        ("fp8-channel", {"format": "int-quantized"}, "format is 'int-quantized'; allowed: 'float-q"),
        ("fp8-channel", {"config_groups": {}}, "config_groups is {}; allowed: an object with one entry"),
        ("packed-32", {"transform_config": {"config_groups": {"u": 1}}}, "transform_config is {'config_groups'"),
    ],
)
def test_unknown_options_are_refused_by_name(name: str, changes: dict, message: str, tmp_path: Path) -> None:
    config = {**formats.FORMATS[name][1], **changes}
    checkpoint = formats.save(tmp_path, name, quantization_config=config, num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match=message):
        read_model(checkpoint.directory / "config.json")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8-channel", {"strategy": "tensor"}, "weights.strategy is 'tensor'; allowed: 'channel'"),
        ("packed-32", {"num_bits": 8}, "weights.num_bits is 8; allowed: 4"),
        ("packed-32", {"actorder": "group"}, "weights.actorder is 'group'; allowed: nothing, 'weight', 'static'"),
        ("packed-32", {"group_size": 16}, "weights.group_size is 16; allowed: 32, 64, 128"),
    ],
)
def test_unknown_weights_of_compressed_tensors_are_refused(
    name: str, changes: dict, message: str, tmp_path: Path
) -> None:
    config = dict(formats.FORMATS[name][1])
    group = dict(config["config_groups"]["group_0"])
    group["weights"] = {**group["weights"], **changes}
    checkpoint = formats.save(
        tmp_path, name, quantization_config={**config, "config_groups": {"group_0": group}}, num_hidden_layers=1
    )
    with pytest.raises(UnsupportedModelError, match=message):
        read_model(checkpoint.directory / "config.json")


def rewritten(checkpoint: formats.Checkpoint, change) -> None:
    """Changes the tensors of a checkpoint in place."""
    from safetensors.torch import load_file, save_file

    path = checkpoint.directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


K_PROJ = "model.layers.0.self_attn.k_proj"


def opened(checkpoint: formats.Checkpoint) -> None:
    open_weights(checkpoint.directory, read_model(checkpoint.directory / "config.json"))


def test_columns_in_order_of_activation_are_refused(tmp_path: Path) -> None:
    config = {**formats.gptq_config(128, False), "desc_act": True}
    checkpoint = formats.save(tmp_path, "gptq", quantization_config=config)
    opened(checkpoint)  # the order is the natural one
    rewritten(checkpoint, lambda tensors: tensors[f"{K_PROJ}.g_idx"].copy_(tensors[f"{K_PROJ}.g_idx"].flip(0)))
    with pytest.raises(CheckpointError, match=f"{K_PROJ}.g_idx orders columns by activation"):
        opened(checkpoint)


def test_zero_points_of_a_symmetric_checkpoint_are_checked(tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path, "gptq", num_hidden_layers=1)
    rewritten(checkpoint, lambda tensors: tensors[f"{K_PROJ}.qzeros"].zero_())
    with pytest.raises(CheckpointError, match=f"{K_PROJ}.qzeros has zero points other than 8"):
        loaded(checkpoint.directory, 1)


def test_scales_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path, "packed-32", num_hidden_layers=1)
    name = f"{K_PROJ}.weight_scale"
    rewritten(checkpoint, lambda tensors: tensors.update({name: tensors[name].float() * 1.001}))
    with pytest.raises(CheckpointError, match=f"the scale of {K_PROJ} is float32 and has values that bfloat16"):
        loaded(checkpoint.directory, 1)


def test_missing_scales_and_wrong_dtypes_are_named(tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path, "fp8-block", num_hidden_layers=1)
    rewritten(checkpoint, lambda tensors: tensors.update({f"{K_PROJ}.weight": tensors[f"{K_PROJ}.weight"].float()}))
    with pytest.raises(CheckpointError, match=f"1 of a dtype other than F8_E4M3: {K_PROJ}.weight is F32"):
        opened(checkpoint)
    rewritten(checkpoint, lambda tensors: tensors.pop(f"{K_PROJ}.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=f"1 missing: {K_PROJ}.weight_scale_inv"):
        opened(checkpoint)


def test_padding_of_an_odd_mlp_is_zero(tmp_path: Path) -> None:
    """352 columns of the MLP on 3 shards are padded; the shards' blocks have few columns."""
    shapes = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 352}
    for name in ("fp8-block", "packed-32"):
        checkpoint = formats.save(tmp_path / name, name, **shapes)
        expected = exact_logits(checkpoint.weights, checkpoint.raw, TOKEN_IDS)
        for tp in (3, 6) if name == "fp8-block" else (3,):
            assert relative_error(our_logits(checkpoint.directory, TOKEN_IDS, tp), expected) < 1e-5


def test_quantized_parameters_keep_their_dtypes(checkpoints: dict[str, formats.Checkpoint]) -> None:
    config = read_model(checkpoints["awq"].directory / "config.json")
    load = partial(load_model, checkpoints["awq"].directory, config, model_layout(config, 2), make_mesh(2))
    _, params = load(jnp.dtype("bfloat16"))
    dtypes = {".".join(path): weight[...].dtype.name for path, weight in nnx.to_flat_state(params)}
    assert dtypes["layers.mlp.down.data"] == dtypes["layers.mlp.down.zero"] == "uint8"
    assert dtypes["layers.mlp.down.scale"] == "float16"
    assert dtypes["embedding"] == dtypes["layers.attention.q_norm"] == "bfloat16"
