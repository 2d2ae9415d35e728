"""Reads the config.json of a published EAGLE-3 head (Li et al., 2025, arXiv 2503.01840).

Two layouts are published. In one (AngelSlim, SGLang, SpecForge), the decoder layer's options stand at the top level,
and `eagle_config` may name the layers whose *outputs* are read. In the other (vLLM's speculators), they stand in
`transformer_layer_config`, and `eagle_aux_hidden_state_layer_ids` names the layers whose *inputs* are read. By default,
these are the inputs of the layers 2, n / 2 and n - 3 of n in either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.errors import UnsupportedModelError
from ..api.model_config import ModelConfig
from .head_config import check_served

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
NUM_LAYERS_READ = 3

# Keys that do not affect the result.
_IGNORED = frozenset(
    "architectures speculators_config speculators_model_type speculators_version auto_map pretraining_tp "
    "embed_requires_grad".split()
)
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
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head."""

    layer: ModelConfig  # of its decoder layer; its vocabulary is that of the head
    served_vocab_size: int
    layers_read: tuple[int, ...]  # ascending: layers of the served model whose inputs it reads
    is_residual_normed: bool  # the residual connection around attention starts from the normalized features


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a head."""
    return any(name in ARCHITECTURES for name in raw.get("architectures") or ())


def read_eagle3(raw: Mapping[str, Any], served: ModelConfig) -> Eagle3Config:
    """Reads a parsed config.json.

    Raises:
      UnsupportedModelError: It has an option that is missing, unknown or not implemented, or it was trained for another
        model than the served one.
    """
    own = {key: value for key, value in raw.items() if key not in _IGNORED}
    options = own | dict(own.pop("transformer_layer_config", None) or {})
    options.pop("transformer_layer_config", None)
    for key in _IGNORED:
        options.pop(key, None)
    is_residual_normed = options.pop("norm_before_residual", None) or False
    layers_read = _layers_read(options.pop("eagle_config", None) or {}, options.pop(_LAYER_IDS, None), served)
    for key, allowed in _FIXED.items():
        found = options.pop(key, allowed)
        if found is not None and found != allowed:
            raise UnsupportedModelError(
                f"config.json of the head: {key} is {found!r}; meshserve implements only {allowed!r}."
            )
    check_served("head", options, served)
    options.pop("target_hidden_size", None)
    vocab_size = options.pop("draft_vocab_size", None) or served.vocab_size
    if not 1 <= vocab_size <= served.vocab_size:
        raise UnsupportedModelError(
            f"config.json of the head: draft_vocab_size is {vocab_size}; allowed is 1 to {served.vocab_size}."
        )
    num_heads = options.get("num_attention_heads")
    if options.get("head_dim") is None and isinstance(num_heads, int) and num_heads > 0:
        options["head_dim"] = served.embed_dim // num_heads
    fixed = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False, "layer_types": None}
    try:
        layer = ModelConfig.from_dict(options | fixed | {"vocab_size": vocab_size})
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"the draft head: {error}") from None
    return Eagle3Config(
        layer=layer,
        served_vocab_size=served.vocab_size,
        layers_read=layers_read,
        is_residual_normed=is_residual_normed,
    )


def _layers_read(nested: Mapping[str, Any], inputs_of: Any, served: ModelConfig) -> tuple[int, ...]:
    """Returns the layers whose inputs are read."""
    unknown = sorted(nested.keys() - {_LAYER_IDS, "use_aux_hidden_state"})
    if unknown or nested.get("use_aux_hidden_state", True) is not True:
        what = unknown[0] if unknown else "use_aux_hidden_state"
        raise UnsupportedModelError(
            f"config.json of the head: eagle_config has {what} = {nested[what]!r}, which is not implemented."
        )
    count = served.num_layers
    if nested.get(_LAYER_IDS) is not None:
        inputs_of = [layer + 1 if isinstance(layer, int) else layer for layer in nested[_LAYER_IDS]]
    layers = (2, count // 2, count - 3) if inputs_of is None else tuple(inputs_of)
    is_valid = len(layers) == NUM_LAYERS_READ and all(isinstance(layer, int) for layer in layers)
    if not is_valid or list(layers) != sorted(layers) or not 0 <= layers[0] <= layers[-1] < count:
        raise UnsupportedModelError(
            f"the head reads the inputs of the layers {layers}; {NUM_LAYERS_READ} of 0 to {count - 1} in ascending "
            "order are needed."
        )
    return layers
