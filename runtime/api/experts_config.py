"""What a mixture-of-experts model is beyond a dense one, read from its config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .errors import UnsupportedModelError
from .model_config import ExpertsConfig, ModelConfig

_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")  # as published, and as transformers 5 writes it
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_KEYS = frozenset({*_NUM_EXPERTS_KEYS, *_SIZES, "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"})
_IGNORED_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef"})  # of training
# Options of published files that must have the one value meshserve implements.
_FIXED_OPTIONS: Mapping[str, Any] = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}


class MoeModelConfig:
    """Reads the config.json of a Qwen3 mixture-of-experts model."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Returns the config.

        Raises:
          UnsupportedModelError: The file names an option that is not implemented, or lacks one.
        """
        own = {*_KEYS, *_IGNORED_KEYS, *_FIXED_OPTIONS}
        config = ModelConfig.from_dict({key: value for key, value in raw.items() if key not in own})
        for key, allowed in _FIXED_OPTIONS.items():
            if raw.get(key) not in (None, allowed):
                raise UnsupportedModelError(
                    f"config.json: {key} is {raw[key]!r}; meshserve implements {allowed!r} only."
                )
        experts = _experts_config({**raw, "num_experts": _num_experts(raw)})
        config = dataclasses.replace(config, experts=experts)
        if not config.stacks["layers"]:
            raise UnsupportedModelError(
                "config.json: decoder_sparse_step and mlp_only_layers leave no layer with experts. Serve the model as "
                "Qwen3ForCausalLM."
            )
        return config


def _num_experts(raw: Mapping[str, Any]) -> Any:
    return next((raw[key] for key in _NUM_EXPERTS_KEYS if raw.get(key) is not None), None)


def _experts_config(raw: Mapping[str, Any]) -> ExpertsConfig:
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    for key, value in [*((key, raw.get(key)) for key in _SIZES), ("decoder_sparse_step", step)]:
        if type(value) is not int or value < 1:
            raise UnsupportedModelError(f"config.json: {key} is {value!r}; allowed is a whole number, 1 or more.")
    if raw["num_experts_per_tok"] > raw["num_experts"]:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {raw['num_experts_per_tok']}; allowed is 1 to num_experts "
            f"({raw['num_experts']})."
        )
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModelError(f"config.json: mlp_only_layers is {dense!r}; allowed is a list of whole numbers.")
    if type(raw.get("norm_topk_prob")) is not bool:
        raise UnsupportedModelError(
            f"config.json: norm_topk_prob is {raw.get('norm_topk_prob')!r}; allowed is true or false."
        )
    return ExpertsConfig(
        num_experts=raw["num_experts"],
        num_chosen=raw["num_experts_per_tok"],
        mlp_dim=raw["moe_intermediate_size"],
        is_normalized=raw["norm_topk_prob"],
        sparse_step=step,
        dense_layers=tuple(sorted(set(dense))),
    )
