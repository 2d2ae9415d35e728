"""Reads the config.json of a published block drafter of the DFlash kind (Chen et al., 2026, arXiv 2602.06036).

Two layouts are published. In one (z-lab, SGLang, SpecForge), the layers' options stand at the top level, and
`dflash_config` has the mask token and the layers whose *outputs* are read, by default evenly spread ones. In the other
(vLLM's speculators), they stand in `transformer_layer_config`, and `aux_hidden_state_layer_ids` names the layers whose
*inputs* are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.errors import UnsupportedModelError
from ..api.model_config import ModelConfig
from .head_config import check_served

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator")

# Keys that do not affect the result; those in the last line belong to training, or to projectors that are refused.
_IGNORED = frozenset(
    "architectures speculators_config speculators_model_type speculators_version auto_map pretraining_tp "
    "max_window_layers tie_word_embeddings pure_draft_prefix_len emb_dim gru_hidden_dim lambda_base_start "
    "lambda_base_decay_ratio auf".split()
)
# Options of which only one value is implemented.
_FIXED: Mapping[str, Any] = {
    "projector_type": "dflash",
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "shift_label": False,
    "is_causal": False,
    "causal": False,
    "input_embedding_scale": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A block drafter."""

    layer: ModelConfig  # of its decoder layers; its vocabulary is that of the drafter
    served_vocab_size: int
    layers_read: tuple[int, ...]  # ascending: layers of the served model whose inputs it reads
    mask_token_id: int  # stands for each token that it drafts
    block_size: int  # the last known token, and the most draft tokens

    @property
    def has_own_head(self) -> bool:
        """Whether it has an output head, of a vocabulary of its own, instead of the served model's."""
        return self.layer.vocab_size != self.served_vocab_size


def is_block_drafter(raw: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a block drafter."""
    return any(name in ARCHITECTURES for name in raw.get("architectures") or ())


def read_block_drafter(raw: Mapping[str, Any], served: ModelConfig) -> BlockConfig:
    """Reads a parsed config.json.

    Raises:
      UnsupportedModelError: It has an option that is missing, unknown or not implemented, or it was trained for another
        model than the served one.
    """
    own = {key: value for key, value in raw.items() if key not in _IGNORED}
    options = dict(own.pop("transformer_layer_config", None) or {}) | own
    nested = dict(own.pop("dflash_config", None) or {})
    for key in ("transformer_layer_config", "dflash_config", *_IGNORED):
        options.pop(key, None)
    by_output = nested.pop("target_layer_ids", None)
    by_input = options.pop("aux_hidden_state_layer_ids", None)
    values = {
        key: nested.pop(key, options.pop(key, None)) for key in ("mask_token_id", "block_size", "num_target_layers")
    }
    for key, allowed in _FIXED.items():
        found = nested.pop(key, options.pop(key, None))
        if found is not None and found != allowed:
            raise UnsupportedModelError(
                f"config.json of the block drafter: {key} is {found!r}; meshserve implements only {allowed!r}."
            )
    if nested:
        key = sorted(nested)[0]
        raise UnsupportedModelError(
            f"config.json of the block drafter: dflash_config has {key} = {nested[key]!r}, which is not implemented."
        )
    check_served("block drafter", options | {"num_target_layers": values["num_target_layers"]}, served)
    options.pop("target_hidden_size", None)
    vocab_size = options.pop("draft_vocab_size", None) or served.vocab_size
    for key, value, low, high in (
        ("draft_vocab_size", vocab_size, 1, served.vocab_size),
        ("mask_token_id", values["mask_token_id"], 0, served.vocab_size - 1),
        ("block_size", values["block_size"], 2, 1 << 10),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise UnsupportedModelError(
                f"config.json of the block drafter: {key} is {value!r}; allowed is {low} to {high}."
            )
    fixed = {"model_type": "qwen3", "tie_word_embeddings": False, "vocab_size": vocab_size}
    try:
        layer = ModelConfig.from_dict(options | fixed)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"the block drafter: {error}") from None
    return BlockConfig(
        layer=layer,
        served_vocab_size=served.vocab_size,
        layers_read=_layers_read(by_output, by_input, layer.num_layers, served),
        mask_token_id=values["mask_token_id"],
        block_size=values["block_size"],
    )


def _layers_read(by_output: Any, by_input: Any, num_layers: int, served: ModelConfig) -> tuple[int, ...]:
    """Returns the layers whose inputs are read."""
    count = served.num_layers
    if by_input is not None:
        layers = tuple(by_input)
    elif by_output is not None:
        layers = tuple(layer + 1 if isinstance(layer, int) else layer for layer in by_output)
    elif num_layers == 1:
        layers = (count // 2 + 1,)
    else:
        layers = tuple(2 + round(index * (count - 4) / (num_layers - 1)) for index in range(num_layers))
    is_valid = layers and all(isinstance(layer, int) for layer in layers)
    if not is_valid or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < count:
        raise UnsupportedModelError(
            f"the block drafter reads the inputs of the layers {layers}; some of 0 to {count - 1} in ascending order "
            "are needed."
        )
    return layers
