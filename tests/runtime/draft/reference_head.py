"""EAGLE-3 heads by the formulas of Li et al., 2025 (arXiv 2503.01840), as vLLM and SGLang read published files."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .reference import VOCAB, Layout, RandomTensors, Reference, Tensors


@dataclass(frozen=True, kw_only=True)
class HeadLayout(Layout):
    """How an EAGLE-3 head is published."""

    layer_prefix: str
    is_residual_normed: bool = False
    has_embedding: bool = False

    def config(self, served_vocab_size: int) -> dict[str, Any]:
        layer = self.layer_config(1, served_vocab_size, "llama")
        size = {} if self.has_whole_vocabulary else {"draft_vocab_size": VOCAB}
        if self.layer_prefix == "midlayer.":
            read = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.layers_read]}
            eagle = {"eagle_config": {**read, "use_aux_hidden_state": True}}
            return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **size, **eagle}
        return {
            "architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, **size,
            "speculators_model_type": "eagle3", "norm_before_residual": self.is_residual_normed,
            "eagle_aux_hidden_state_layer_ids": list(self.layers_read),
        }  # fmt: skip

    def fill(self, random: RandomTensors, served_vocab_size: int) -> None:
        random.matrix("fc", self.embed_dim, 3 * self.embed_dim)
        random.layer(self.layer_prefix, 2 * self.embed_dim)
        for name in (f"{self.layer_prefix}hidden_norm", "norm"):
            random.gain(name)
        random.matrix("lm_head", served_vocab_size if self.has_whole_vocabulary else VOCAB, self.embed_dim)
        if self.has_embedding:
            random.matrix("embed_tokens", served_vocab_size, self.embed_dim)

    def reference(self, tensors: Tensors, embedding: np.ndarray, head: np.ndarray) -> "ReferenceHead":
        return ReferenceHead(tensors, self, embedding)


ANGELSLIM = HeadLayout(layer_prefix="midlayer.", layers_read=(1, 2, 4))
SPECULATORS = HeadLayout(
    layer_prefix="layers.0.", layers_read=(0, 2, 3), is_residual_normed=True, has_embedding=True
)  # fmt: skip
WHOLE_VOCABULARY = HeadLayout(layer_prefix="midlayer.", layers_read=(1, 1, 3), has_whole_vocabulary=True)


class ReferenceHead(Reference):
    """An EAGLE-3 head."""

    def __init__(self, tensors: Tensors, layout: HeadLayout, embedding: np.ndarray):
        super().__init__({name.removeprefix(layout.layer_prefix): value for name, value in tensors.items()})
        self._is_residual_normed = layout.is_residual_normed
        self._embedding = tensors.get("embed_tokens.weight", embedding).astype(np.float64)

    def draft(self, token_ids: list[int], hidden: list[np.ndarray], num_drafts: int) -> list[int]:
        features = self.merged(hidden, len(token_ids) - 1)
        following, drafts = list(token_ids[1:]), []
        for _ in range(num_drafts):
            normed = self.norm(features, "hidden_norm")
            x = np.concatenate([self.norm(self._embedding[following], "input_layernorm"), normed], axis=1)
            residual = (normed if self._is_residual_normed else features)[-1:]
            out = self.mlp("", residual + self.attention("self_attn.", x[-1:], x))
            drafts += self.best(out, self.weight("lm_head"))
            following.append(drafts[-1])
            features = np.concatenate([features, out])
        return drafts
