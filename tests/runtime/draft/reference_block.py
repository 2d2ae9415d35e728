"""Block drafters by the formulas of Chen et al., 2026 (arXiv 2602.06036), as their authors read published files."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .reference import HEAD_DIM, VOCAB, Layout, RandomTensors, Reference, Tensors

BLOCK_SIZE, MASK = 6, 17


@dataclass(frozen=True, kw_only=True)
class BlockLayout(Layout):
    """How a block drafter is published."""

    num_layers: int
    is_nested: bool = False  # as in vLLM's speculators

    def config(self, served_vocab_size: int) -> dict[str, Any]:
        layer = self.layer_config(self.num_layers, served_vocab_size, "qwen3")
        layer |= {"attention_bias": False, "layer_types": ["full_attention"] * self.num_layers}
        if not self.is_nested:
            read = [layer - 1 for layer in self.layers_read]
            own = {"block_size": BLOCK_SIZE, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": read}}
            return {"architectures": ["DFlashDraftModel"], **layer, **own, "auto_map": {"AutoModel": "dflash.Model"}}
        return {
            "architectures": ["DFlashSpeculator"], "transformer_layer_config": layer, "block_size": BLOCK_SIZE,
            "speculators_model_type": "dflash", "mask_token_id": MASK, "projector_type": "dflash", "emb_dim": 256,
            "aux_hidden_state_layer_ids": list(self.layers_read), "sample_from_anchor": False,
            "draft_vocab_size": served_vocab_size if self.has_whole_vocabulary else VOCAB, "target_hidden_size": None,
        }  # fmt: skip

    def fill(self, random: RandomTensors, served_vocab_size: int) -> None:
        random.matrix("fc", self.embed_dim, len(self.layers_read) * self.embed_dim)
        for name in ("hidden_norm", "norm"):
            random.gain(name)
        for prefix in (f"layers.{index}." for index in range(self.num_layers)):
            random.layer(prefix, self.embed_dim)
            for name in ("q_norm", "k_norm"):
                random.gain(f"{prefix}self_attn.{name}", HEAD_DIM)
        if not self.has_whole_vocabulary:
            random.matrix("lm_head", VOCAB, self.embed_dim)

    def reference(self, tensors: Tensors, embedding: np.ndarray, head: np.ndarray) -> "ReferenceBlock":
        return ReferenceBlock(tensors, self, embedding, head)


DFLASH = BlockLayout(layers_read=(1, 2, 4), num_layers=3, has_whole_vocabulary=True)
DFLASH_SMALL = BlockLayout(layers_read=(3,), num_layers=1, has_whole_vocabulary=True)
BLOCK_SPECULATORS = BlockLayout(layers_read=(0, 2, 3, 4), num_layers=2, is_nested=True)


class ReferenceBlock(Reference):
    """A block drafter."""

    def __init__(self, tensors: Tensors, layout: BlockLayout, embedding: np.ndarray, head: np.ndarray):
        super().__init__(tensors)
        self._num_layers = layout.num_layers
        self._embedding = embedding.astype(np.float64)
        self._head = tensors.get("lm_head.weight", head)

    def draft(self, token_ids: list[int], hidden: list[np.ndarray], num_drafts: int) -> list[int]:
        features = self.norm(self.merged(hidden, len(token_ids) - 1), "hidden_norm")
        x = self._embedding[[token_ids[-1], *[MASK] * num_drafts]]
        for prefix in (f"layers.{index}." for index in range(self._num_layers)):
            normed = self.norm(x, f"{prefix}input_layernorm")
            attended = self.attention(f"{prefix}self_attn.", normed, np.concatenate([features, normed]))
            x = self.mlp(prefix, x + attended)
        return self.best(x[1:], self._head)
