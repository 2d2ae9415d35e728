"""Writes adapters (LoRA) as PEFT saves them, and merges them into a model's weights by hand.

The names of tensors and the keys of the config are written by hand after PEFT's format; no test runs PEFT itself.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# What PEFT writes beside the options that tests set.
CONFIG = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "tiny", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.0",
    "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None, "target_modules": list(ATTENTION),
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def module(layer: int, target: str) -> str:
    """Returns the name of a projection in a model's files."""
    return f"model.layers.{layer}.{'self_attn' if target in ATTENTION else 'mlp'}.{target}"


def ranks_of(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Returns the rank and the scale of a module."""

    def found(pattern: str, default: float) -> float:
        return next((value for end, value in config[pattern].items() if name.endswith(end)), default)

    rank, alpha = int(found("rank_pattern", config["r"])), found("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def save_adapter(
    directory: Path, base: Path, *, seed: int, targets: Sequence[str] = ALL, strength: float = 0.3, **options: Any
) -> Path:
    """Writes a random adapter of a base model into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "target_modules": list(targets), **options}
    weights, draw = load_file(base / "model.safetensors"), torch.Generator().manual_seed(seed)
    num_layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    layers = range(num_layers) if config["layers_to_transform"] is None else config["layers_to_transform"]
    tensors = {}
    for layer in layers:
        for target in targets:
            name = module(layer, target)
            if f"{name}.weight" not in weights:
                continue
            (rows, columns), (rank, scale) = weights[f"{name}.weight"].shape, ranks_of(config, name)
            down = torch.randn((rank, columns), generator=draw) * columns**-0.5
            up = torch.randn((rows, rank), generator=draw) * strength / scale * rank**-0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(directory: Path, base: Path, adapter: Path) -> Path:
    """Writes the base model with an adapter merged into its weights into `directory`: W + scale * B A."""
    shutil.copytree(base, directory, dirs_exist_ok=True)
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, down in parts.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up, (_, scale) = parts[key.replace("lora_A", "lora_B")], ranks_of(config, name)
            own = name if f"{name}.weight" in weights else name.removeprefix("model.")  # as embedding models have it
            weights[f"{own}.weight"] = weights[f"{own}.weight"] + scale * (up @ down)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
