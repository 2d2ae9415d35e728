"""Reads the config.json of a published EAGLE-3 head (Li et al., 2025, arXiv 2503.01840).

Two layouts are published. In one (AngelSlim, SGLang, SpecForge), the decoder layer's options stand at the top level,
and `eagle_config` may name the layers whose *outputs* are read. In the other (vLLM's speculators), they stand in
`transformer_layer_config`, and `eagle_aux_hidden_state_layer_ids` names the layers whose *inputs* are read. By default,
these are the inputs of the layers 2, n / 2 and n - 3 of n in either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...model_files.model_config import ModelConfig
from ...model_files.number_bounds import shown
from .head_config import HeadOptions, has_class, inputs_after

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
NUM_LAYERS_READ = 3

# Options of which only one value is implemented.
_FIXED: Mapping[str, Any] = {
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "tie_word_embeddings": False,
    "num_hidden_layers": 1,
}
_LAYER_IDS, _READS_LAYERS = "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head."""

    layer: ModelConfig  # describes its decoder layer; its vocabulary is that of the head
    served_vocab_size: int
    layers_read: tuple[int, ...]  # ascending: layers of the served model whose inputs it reads
    is_residual_normed: bool  # the residual connection around attention starts from the normalized features


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a head."""
    return has_class(raw, ARCHITECTURES)


def read_eagle3(raw: Mapping[str, Any], served: ModelConfig) -> Eagle3Config:
    """Reads a parsed config.json.

    Raises:
      UnsupportedModelError: It has an option that is missing, unknown or not implemented, or it was trained for another
        model than the served one.
    """
    options = HeadOptions("draft head", raw, served, {"embed_requires_grad"})
    is_residual_normed = options.take("norm_before_residual") or False
    layers_read = _layers_read(options)
    options.check_fixed(_FIXED)
    num_heads = options.left.get("num_attention_heads")
    if options.left.get("head_dim") is None and isinstance(num_heads, int) and num_heads > 0:
        options.left["head_dim"] = served.embed_dim // num_heads
    layer = options.take_layer({"model_type": "llama", "num_hidden_layers": 1, "layer_types": None})
    return Eagle3Config(
        layer=layer,
        served_vocab_size=served.vocab_size,
        layers_read=layers_read,
        is_residual_normed=is_residual_normed,
    )


def _layers_read(options: HeadOptions) -> tuple[int, ...]:
    """Returns the layers whose inputs are read."""
    inputs_of, group = options.take(_LAYER_IDS), options.take_group("eagle_config", {_LAYER_IDS, _READS_LAYERS})
    if group.get(_READS_LAYERS, True) is not True:
        raise options.refuse(
            f"eagle_config has {_READS_LAYERS} = {shown(group[_READS_LAYERS])}, which is not implemented."
        )
    if group.get(_LAYER_IDS) is not None:
        inputs_of = inputs_after(group[_LAYER_IDS])
    count = options.served.num_layers
    return options.check_layers_read((2, count // 2, count - 3) if inputs_of is None else inputs_of, NUM_LAYERS_READ)
