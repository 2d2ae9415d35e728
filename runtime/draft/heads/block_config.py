"""Reads the config.json of a published block drafter of the DFlash kind (Chen et al., 2026, arXiv 2602.06036).

Two layouts are published. In one (z-lab, SGLang, SpecForge), the layers' options stand at the top level, and
`dflash_config` has the mask token and the layers whose *outputs* are read, by default evenly spread ones. In the other
(vLLM's speculators), they stand in `transformer_layer_config`, and `aux_hidden_state_layer_ids` names the layers whose
*inputs* are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...model_files.model_config import ModelConfig
from .head_config import HeadOptions, has_class, inputs_after

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator")

# Keys that do not affect the result, belong to training, or to projectors that are refused.
_IGNORED = frozenset(
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
# Options that stand in `dflash_config` or at the top level.
_GROUPED = frozenset({"mask_token_id", "block_size", "num_target_layers", "target_layer_ids"})


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A block drafter."""

    layer: ModelConfig  # describes its decoder layers; its vocabulary is that of the drafter
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
    return has_class(raw, ARCHITECTURES)


def read_block_drafter(raw: Mapping[str, Any], served: ModelConfig) -> BlockConfig:
    """Reads a parsed config.json.

    Raises:
      UnsupportedModelError: It has an option that is missing, unknown or not implemented, or it was trained for another
        model than the served one.
    """
    options = HeadOptions("block drafter", raw, served, _IGNORED)
    options.left |= options.take_group("dflash_config", _GROUPED | _FIXED.keys())
    by_output, by_input = options.take("target_layer_ids"), options.take("aux_hidden_state_layer_ids")
    options.check_fixed(_FIXED)
    mask_token_id = options.take_number("mask_token_id", 0, served.vocab_size - 1)
    block_size = options.take_number("block_size", 2, 1 << 10)
    layer = options.take_layer({"model_type": "qwen3"})
    if by_input is None:
        by_input = _by_default(layer.num_layers, served.num_layers) if by_output is None else inputs_after(by_output)
    return BlockConfig(
        layer=layer,
        served_vocab_size=served.vocab_size,
        layers_read=options.check_layers_read(by_input),
        mask_token_id=mask_token_id,
        block_size=block_size,
    )


def _by_default(num_layers: int, num_served: int) -> list[int]:
    """Returns evenly spread layers whose inputs are read."""
    if num_layers == 1:
        return [num_served // 2 + 1]
    return [2 + round(index * (num_served - 4) / (num_layers - 1)) for index in range(num_layers)]
