"""What a mixture-of-experts model is beyond a dense one, read from its config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshserve.kernels.router import RouterOptions

from ..api.errors import UnsupportedModelError
from .model_config import DEFAULTS, ExpertsConfig, ModelConfig, with_defaults
from .number_bounds import LAYER, MAX_EXPERTS_OF_ALL_LAYERS, check_number, shown

_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")  # as published, and as transformers 5 writes it
# What the class of transformers assumes for keys that a file lacks, beside those of dense models.
_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
}
_EXPERT_DEFAULTS: Mapping[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
}
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
_IGNORED_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef"})  # used in training only


class MoeModelConfig:
    """Reads the config.json of a Qwen3 mixture-of-experts model."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Returns the config.

        Raises:
          UnsupportedModelError: The file names an option that is not implemented.
        """
        shared = raw.get("shared_expert_intermediate_size")
        if shared:
            raise UnsupportedModelError(
                f"config.json: shared_expert_intermediate_size is {shown(shared)}; meshserve implements 0 only."
            )
        own = {*_NUM_EXPERTS_KEYS, *_EXPERT_DEFAULTS, *_IGNORED_KEYS, "shared_expert_intermediate_size"}
        config = ModelConfig.from_dict(raw, _dense_defaults(raw), frozenset(own))
        options, assumed = with_defaults({**raw, "num_experts": _num_experts(raw)}, _EXPERT_DEFAULTS)
        notes = config.notes._replace(assumed=(*config.notes.assumed, *assumed))
        config = dataclasses.replace(config, experts=_experts_config(options, config.num_layers), notes=notes)
        if not config.stacks["layers"]:
            raise UnsupportedModelError(
                "config.json: decoder_sparse_step and mlp_only_layers leave no layer with experts. Serve the model as "
                "Qwen3ForCausalLM."
            )
        return config


def _dense_defaults(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the defaults of what the model shares with dense ones. Its heads divide the embedding by default."""
    embed_dim, heads = (raw.get(key) or _DEFAULTS[key] for key in ("hidden_size", "num_attention_heads"))
    is_valid = type(embed_dim) is type(heads) is int and heads > 0
    return {**_DEFAULTS, "head_dim": embed_dim // heads if is_valid else _DEFAULTS["head_dim"]}


def _num_experts(raw: Mapping[str, Any]) -> Any:
    return next((raw[key] for key in _NUM_EXPERTS_KEYS if raw.get(key) is not None), None)


def _experts_config(options: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    dense = options["mlp_only_layers"]
    for key in _SIZES:
        check_number(options, key)
    num_experts = options["num_experts"]
    if num_experts * num_layers > MAX_EXPERTS_OF_ALL_LAYERS:
        raise UnsupportedModelError(
            f"config.json: num_experts is {num_experts} in each of num_hidden_layers, {num_layers}; allowed are "
            f"{MAX_EXPERTS_OF_ALL_LAYERS} together."
        )
    if options["num_experts_per_tok"] > options["num_experts"]:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {options['num_experts_per_tok']}; allowed is 1 to num_experts "
            f"({options['num_experts']})."
        )
    if not isinstance(dense, list) or not all(map(LAYER.accepts, dense)):
        raise UnsupportedModelError(
            f"config.json: mlp_only_layers is {shown(dense)}; allowed is a list of layers, each {LAYER}."
        )
    if type(options["norm_topk_prob"]) is not bool:
        raise UnsupportedModelError(
            f"config.json: norm_topk_prob is {shown(options['norm_topk_prob'])}; allowed is true or false."
        )
    return ExpertsConfig(
        num_experts=options["num_experts"],
        router=RouterOptions(num_chosen=options["num_experts_per_tok"], is_normalized=options["norm_topk_prob"]),
        mlp_dim=options["moe_intermediate_size"],
        sparse_step=options["decoder_sparse_step"],
        dense_layers=tuple(sorted(set(dense))),
    )
