"""Random checkpoints in every published format, and what their weights are exactly.

The numbers are packed here as the formats are described, bit by bit, with no code of meshserve:

* compressed-tensors: with the packing function of the package of that name.
* AWQ (AutoAWQ, "gemm"): a word holds 8 rows of a column; from the lowest bits on rows 0, 2, 4, 6, 1, 3, 5, 7.
* NVFP4 and MXFP4 (ModelOpt): a byte holds 2 columns of a row, the first in its low half. compressed-tensors' are packed
  by its own function.
* GPTQ (AutoGPTQ): a word holds 8 columns of a row, in order; a zero point is stored less 1 (version 1).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

# 8 query heads over 4 KV heads of 32; blocks of 128 rows cover several heads, and are cut from TP 4 on.
SHAPES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_DEVIATION = 0.06  # standard deviation of a weight


class Stored(NamedTuple):
    """The tensors of a module by their last name, and its weights [N, K]."""

    tensors: dict[str, torch.Tensor]
    exact: np.ndarray  # float64


class Checkpoint(NamedTuple):
    """A checkpoint on disk."""

    directory: Path
    weights: dict[str, np.ndarray]  # every weight in float64, by the name that an unquantized checkpoint has
    raw: dict[str, Any]  # config.json


def random_numbers(rng: np.random.Generator, rows: int, columns: int) -> torch.Tensor:
    numbers = np.clip(rng.standard_normal((rows, columns)) * 60, -448, 448)
    return torch.tensor(numbers, dtype=torch.float32).to(torch.float8_e4m3fn)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], level: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(level * 2.0 ** rng.uniform(-1, 1, shape), dtype=torch.float64).to(dtype)


def _exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy()


def fp8_block(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    data = random_numbers(rng, rows, columns)
    grid = -(-rows // 128), -(-columns // 128)
    scale = random_scales(rng, grid, _DEVIATION / 60, torch.float32)
    wide = np.repeat(np.repeat(_exact(scale), 128, 0), 128, 1)[:rows, :columns]
    return Stored({"weight": data, "weight_scale_inv": scale}, _exact(data) * wide)


def fp8_channel(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    data = random_numbers(rng, rows, columns)
    scale = random_scales(rng, (rows, 1), _DEVIATION / 60, torch.bfloat16)
    return Stored({"weight": data, "weight_scale": scale}, _exact(data) * _exact(scale))


def fp8_block_of_compressed_tensors(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    tensors, exact = fp8_block(rng, rows, columns)
    return Stored({"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, exact)


def random_int4(
    rng: np.random.Generator, rows: int, columns: int, group: int, has_zero: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers [N, K] and zero points [N, K / group], both in 0..15."""
    zero = rng.integers(0, 16, (rows, columns // group)) if has_zero else np.full((rows, columns // group), 8)
    return rng.integers(0, 16, (rows, columns)), zero


def _exact_int4(numbers: np.ndarray, zero: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    return (numbers - np.repeat(zero, group, 1)) * np.repeat(scale, group, 1)


def packed_int4(group: int, has_zero: bool) -> Callable[..., Stored]:
    def store(rng: np.random.Generator, rows: int, columns: int) -> Stored:
        numbers, zero = random_int4(rng, rows, columns, group, has_zero)
        scale = random_scales(rng, zero.shape, _DEVIATION / 5, torch.bfloat16)
        signed = [torch.tensor(values - 8, dtype=torch.int8) for values in (numbers, zero)]
        tensors = {
            "weight_packed": pack_to_int32(signed[0], 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if has_zero:
            tensors["weight_zero_point"] = pack_to_int32(signed[1], 4, packed_dim=0)
        return Stored(tensors, _exact_int4(numbers, zero, _exact(scale), group))

    return store


def words(fields: np.ndarray) -> torch.Tensor:
    """Packs 4-bit numbers [..., 8], the first into the lowest bits, into int32 [...]."""
    packed = (fields.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return torch.tensor(packed.view(np.int32))


def awq(group: int) -> Callable[..., Stored]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def store(rng: np.random.Generator, rows: int, columns: int) -> Stored:
        numbers, zero = random_int4(rng, rows, columns, group, True)
        scale = random_scales(rng, (columns // group, rows), _DEVIATION / 5, torch.float16)
        tensors = {
            "qweight": words(numbers.T.reshape(columns, rows // 8, 8)[..., order]),
            "qzeros": words(zero.T.reshape(columns // group, rows // 8, 8)[..., order]),
            "scales": scale,
        }
        return Stored(tensors, _exact_int4(numbers, zero, _exact(scale).T, group))

    return store


def gptq(group: int, has_zero: bool, version: int = 1, has_order: bool = True) -> Callable[..., Stored]:
    def store(rng: np.random.Generator, rows: int, columns: int) -> Stored:
        numbers, zero = random_int4(rng, rows, columns, group, has_zero)
        scale = random_scales(rng, (columns // group, rows), _DEVIATION / 5, torch.float16)
        stored_zero = (zero - 1) % 16 if version == 1 else zero
        tensors = {
            "qweight": words(np.moveaxis(numbers.T.reshape(columns // 8, 8, rows), 1, -1)),
            "qzeros": words(stored_zero.T.reshape(columns // group, rows // 8, 8)),
            "scales": scale,
        }
        if has_order:
            tensors["g_idx"] = torch.arange(columns, dtype=torch.int32) // group
        return Stored(tensors, _exact_int4(numbers, zero, _exact(scale).T, group))

    return store


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by a number's bits


def random_fp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns 4-bit floats [N, K], and pairs of their bits as ModelOpt stores them."""
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    return E2M1[codes], codes[:, 0::2] + 16 * codes[:, 1::2]


def _of_groups(numbers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns numbers times the scales of groups of columns, rounded to float32 as both definitions say."""
    exact = numbers * np.repeat(scale, numbers.shape[1] // scale.shape[1], axis=1)
    assert exact.dtype == np.float32
    return exact.astype(np.float64)


def nvfp4(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    numbers, data = random_fp4(rng, rows, columns)
    scale = random_scales(rng, (rows, columns // 16), 2.0, torch.float8_e4m3fn)
    tensor_scale = random_scales(rng, (), _DEVIATION / 6, torch.float32)
    tensors = {
        "weight": torch.tensor(data),
        "weight_scale": scale,
        "weight_scale_2": tensor_scale,
        "input_scale": torch.tensor(0.3),
    }
    return Stored(tensors, _of_groups(numbers, scale.to(torch.float32).numpy() * tensor_scale.numpy()))


def packed_nvfp4(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    numbers, _ = random_fp4(rng, rows, columns)
    scale = random_scales(rng, (rows, columns // 16), 2.0, torch.float8_e4m3fn)
    divisor = torch.tensor([2.0 ** rng.integers(6, 8)], dtype=torch.float32)  # whose inverse is not rounded
    tensors = {
        "weight_packed": pack_fp4_to_uint8(torch.tensor(numbers)),
        "weight_scale": scale,
        "weight_global_scale": divisor,
        "input_global_scale": torch.tensor([0.3]),
    }
    return Stored(tensors, _of_groups(numbers, scale.to(torch.float32).numpy() / divisor.numpy()))


def _mxfp4_scales(rng: np.random.Generator, rows: int, columns: int) -> tuple[torch.Tensor, np.ndarray]:
    exponents = rng.integers(-8, -4, (rows, columns // 32))
    return torch.tensor(exponents + 127, dtype=torch.uint8), 2.0 ** exponents.astype(np.float32)


def mxfp4(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    numbers, data = random_fp4(rng, rows, columns)
    stored, scale = _mxfp4_scales(rng, rows, columns)
    return Stored({"weight": torch.tensor(data), "weight_scale": stored}, _of_groups(numbers, scale))


def packed_mxfp4(rng: np.random.Generator, rows: int, columns: int) -> Stored:
    numbers, _ = random_fp4(rng, rows, columns)
    stored, scale = _mxfp4_scales(rng, rows, columns)
    tensors = {"weight_packed": pack_fp4_to_uint8(torch.tensor(numbers)), "weight_scale": stored}
    return Stored(tensors, _of_groups(numbers, scale))


def group_config(kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a `quantization_config` of compressed-tensors as llm-compressor writes it."""
    common = {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**common, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


FP8_BLOCK_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_DYNAMIC = {
    "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8, "observer": None,
    "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float",
}  # fmt: skip
FP8_CHANNEL_CONFIG = group_config(
    "float-quantized",
    {"group_size": None, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"},
    _DYNAMIC,
)


FP8_BLOCK_GROUP_CONFIG = group_config(
    "float-quantized",
    {
        "block_structure": [128, 128], "group_size": None, "num_bits": 8, "strategy": "block", "symmetric": True,
        "type": "float",
    },
    {**_DYNAMIC, "strategy": "group", "group_size": 128},
)  # fmt: skip


def packed_config(group: int, has_zero: bool) -> dict[str, Any]:
    weights = {"group_size": group, "num_bits": 4, "strategy": "group", "symmetric": not has_zero, "type": "int"}
    return group_config("pack-quantized", weights, None)


def awq_config(group: int) -> dict[str, Any]:
    return {
        "bits": 4, "group_size": group, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    }  # fmt: skip


def gptq_config(group: int, has_zero: bool, version: int = 1) -> dict[str, Any]:
    return {
        "bits": 4, "group_size": group, "damp_percent": 0.01, "desc_act": False, "sym": not has_zero, "lm_head": False,
        "quant_method": "gptq", "true_sequential": True, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip


def auto_round_config(group: int, packing: str) -> dict[str, Any]:
    return {
        "bits": 4, "group_size": group, "sym": packing == "auto_gptq", "data_type": "int", "iters": 200,
        "quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "autoround_version": "0.9.2",
        "block_name_to_quantize": "model.layers",
    }  # fmt: skip


_FP4_WEIGHTS = {"num_bits": 4, "symmetric": True, "type": "float"}
NVFP4_PACKED_CONFIG = group_config(
    "nvfp4-pack-quantized",
    {**_FP4_WEIGHTS, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    {**_DYNAMIC, "dynamic": "local", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
)
MXFP4_PACKED_CONFIG = group_config(
    "mxfp4-pack-quantized",
    {**_FP4_WEIGHTS, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
    None,
)


def modelopt_config(algorithm: str, group: int) -> dict[str, Any]:
    """Returns a `quantization_config` as ModelOpt writes it; for MXFP4 it writes no group."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group}
    return {
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_method": "modelopt",
    }


# name -> how a module is stored, `quantization_config`, dtype in config.json
FORMATS: dict[str, tuple[Callable[..., Stored], dict[str, Any], str]] = {
    "fp8-block": (fp8_block, FP8_BLOCK_CONFIG, "bfloat16"),
    "fp8-channel": (fp8_channel, FP8_CHANNEL_CONFIG, "bfloat16"),
    "packed-32": (packed_int4(32, False), packed_config(32, False), "bfloat16"),
    "packed-64-zero": (packed_int4(64, True), packed_config(64, True), "bfloat16"),
    "packed-128": (packed_int4(128, False), packed_config(128, False), "bfloat16"),
    "awq": (awq(128), awq_config(128), "float16"),
    "gptq": (gptq(128, False), gptq_config(128, False), "float16"),
    "gptq-zero": (gptq(128, True, has_order=False), gptq_config(128, True), "float16"),
    "auto-round": (gptq(128, False), auto_round_config(128, "auto_gptq"), "bfloat16"),
    "auto-round-awq": (awq(64), auto_round_config(64, "auto_awq"), "float16"),
    "fp8-block-group": (fp8_block_of_compressed_tensors, FP8_BLOCK_GROUP_CONFIG, "bfloat16"),
    "nvfp4": (nvfp4, modelopt_config("NVFP4", 16), "bfloat16"),
    "nvfp4-packed": (packed_nvfp4, NVFP4_PACKED_CONFIG, "bfloat16"),
    "mxfp4": (mxfp4, modelopt_config("mxfp4", 32), "bfloat16"),
    "mxfp4-packed": (packed_mxfp4, MXFP4_PACKED_CONFIG, "bfloat16"),
    "gptq-v2-32": (gptq(32, True, version=2), gptq_config(32, True, version=2), "float16"),
}


def save(
    directory: Path,
    name: str,
    *,
    seed: int = 0,
    is_plain: Callable[[str], bool] = lambda module: False,
    **changes: Any,
) -> Checkpoint:
    """Writes a random checkpoint in a format.

    Args:
      directory: Where to write it.
      name: Key of `FORMATS`.
      seed: The seed of the random numbers.
      is_plain: Which modules are not quantized; `quantization_config` must be changed accordingly.
      **changes: Changes of config.json.
    """
    store, quantization, dtype = FORMATS[name]
    raw = {**BASE, **SHAPES, "dtype": dtype, "quantization_config": quantization, **changes}
    rng = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    weights: dict[str, np.ndarray] = {}
    kind = getattr(torch, dtype)

    def plain(tensor: str, values: np.ndarray) -> None:
        tensors[tensor] = torch.tensor(values).to(kind)
        weights[tensor] = _exact(tensors[tensor])

    def projection(module: str, rows: int, columns: int) -> None:
        if is_plain(module):
            plain(f"{module}.weight", rng.standard_normal((rows, columns)) * _DEVIATION)
            return
        stored = store(rng, rows, columns)
        tensors.update({f"{module}.{tensor}": value.contiguous() for tensor, value in stored.tensors.items()})
        weights[f"{module}.weight"] = stored.exact

    def gain(tensor: str, size: int) -> None:
        plain(tensor, 1 + 0.1 * rng.standard_normal(size))

    embed, mlp, head_dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = (head_dim * raw[key] for key in ("num_attention_heads", "num_key_value_heads"))
    plain("model.embed_tokens.weight", rng.standard_normal((raw["vocab_size"], embed)))
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm, size in (("input_layernorm", embed), ("post_attention_layernorm", embed)):
            gain(f"{prefix}.{norm}.weight", size)
        for norm in ("q_norm", "k_norm"):
            gain(f"{prefix}.self_attn.{norm}.weight", head_dim)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            projection(f"{prefix}.self_attn.{part}_proj", rows, embed)
        projection(f"{prefix}.self_attn.o_proj", embed, queries)
        for part in ("gate", "up"):
            projection(f"{prefix}.mlp.{part}_proj", mlp, embed)
        projection(f"{prefix}.mlp.down_proj", embed, mlp)
    gain("model.norm.weight", embed)
    plain("lm_head.weight", rng.standard_normal((raw["vocab_size"], embed)) * _DEVIATION)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(raw))
    return Checkpoint(directory, weights, raw)


def save_plain(directory: Path, checkpoint: Checkpoint) -> Path:
    """Writes an unquantized float32 checkpoint with the exact weights of a quantized one, rounded to float32."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in checkpoint.weights.items()}
    save_file(tensors, str(directory / "model.safetensors"))
    raw = {**checkpoint.raw, "dtype": "float32", "quantization_config": None}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory
