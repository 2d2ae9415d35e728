"""An EAGLE-3 head in plain numpy and float64, from the formulas, over whole sequences; and random heads in files.

Sources of the formulas: Li et al., 2025 (arXiv 2503.01840), and what the published files mean to vLLM and SGLang.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

EMBED, QUERY_HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, EPSILON, THETA = 48, 8, 2, 16, 80, 96, 1e-5, 5000.0


@dataclass(frozen=True)
class Layout:
    """How a head is published."""

    layer_prefix: str
    layers_read: tuple[int, ...]  # of the served model: those whose inputs it reads
    is_residual_normed: bool
    has_embedding: bool
    has_whole_vocabulary: bool

    def config(self, served_vocab_size: int) -> dict[str, Any]:
        layer = {
            "hidden_size": EMBED, "intermediate_size": MLP, "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPSILON, "rope_theta": THETA,
            "max_position_embeddings": 512, "num_hidden_layers": 1, "vocab_size": served_vocab_size,
            "tie_word_embeddings": False, "model_type": "llama", "hidden_act": "silu",
        }  # fmt: skip
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


ANGELSLIM = Layout("midlayer.", (1, 2, 4), False, False, False)
SPECULATORS = Layout("layers.0.", (0, 2, 3), True, True, False)
WHOLE_VOCABULARY = Layout("midlayer.", (1, 1, 3), False, False, True)


def save_head(directory: Path, layout: Layout, served_vocab_size: int, seed: int = 5) -> dict[str, np.ndarray]:
    """Writes a random head, and returns its tensors."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.5 * shape[-1] ** -0.5).astype(np.float32)

    def gain() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(EMBED)).astype(np.float32)

    prefix, vocab_size = layout.layer_prefix, served_vocab_size if layout.has_whole_vocabulary else VOCAB
    tensors = {
        "fc.weight": matrix(EMBED, 3 * EMBED),
        f"{prefix}input_layernorm.weight": gain(),
        f"{prefix}hidden_norm.weight": gain(),
        f"{prefix}self_attn.q_proj.weight": matrix(QUERY_HEADS * HEAD_DIM, 2 * EMBED),
        f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * EMBED),
        f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * EMBED),
        f"{prefix}self_attn.o_proj.weight": matrix(EMBED, QUERY_HEADS * HEAD_DIM),
        f"{prefix}post_attention_layernorm.weight": gain(),
        f"{prefix}mlp.gate_proj.weight": matrix(MLP, EMBED),
        f"{prefix}mlp.up_proj.weight": matrix(MLP, EMBED),
        f"{prefix}mlp.down_proj.weight": matrix(EMBED, MLP),
        "norm.weight": gain(),
        "lm_head.weight": matrix(vocab_size, EMBED),
    }
    if layout.has_embedding:
        tensors["embed_tokens.weight"] = matrix(served_vocab_size, EMBED)
    if not layout.has_whole_vocabulary:
        chosen = np.sort(rng.choice(served_vocab_size, VOCAB, replace=False))
        tensors["d2t"] = (chosen - np.arange(VOCAB)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(served_vocab_size), chosen)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(layout.config(served_vocab_size)))
    return tensors


class ReferenceHead:
    """Drafts greedily.

    Args:
      tensors: The head's.
      layout: How they are named and meant.
      embedding: The served model's.
    """

    def __init__(self, tensors: dict[str, np.ndarray], layout: Layout, embedding: np.ndarray):
        self._tensors = {name.removeprefix(layout.layer_prefix): value for name, value in tensors.items()}
        self._layout = layout
        self._embedding = tensors.get("embed_tokens.weight", embedding).astype(np.float64)

    def draft(self, token_ids: list[int], hidden: list[np.ndarray], num_drafts: int) -> list[int]:
        """Returns draft tokens after known ones.

        Args:
          token_ids: The known tokens; the served model has computed all but the last.
          hidden: Of each layer read, its inputs [len(token_ids) - 1, D] or more.
          num_drafts: How many.
        """
        count = len(token_ids) - 1
        merged = np.concatenate([states[:count] for states in hidden], axis=1).astype(np.float64)
        features = list(merged @ self._weight("fc").T)
        following, drafts = list(token_ids[1:]), []
        for _ in range(num_drafts):
            out = self._layer(np.array(features), self._embedding[following])
            logits = self._norm(out, "norm") @ self._weight("lm_head").T
            draft_id = int(logits.argmax())
            token_id = draft_id + int(self._tensors["d2t"][draft_id]) if "d2t" in self._tensors else draft_id
            drafts.append(token_id)
            following.append(token_id)
            features.append(out)
        return drafts

    def _layer(self, features: np.ndarray, embedded: np.ndarray) -> np.ndarray:
        """Returns the output at the last of these positions, [D]."""
        normed = self._norm(features, "hidden_norm")
        x = np.concatenate([self._norm(embedded, "input_layernorm"), normed], axis=1)
        positions = np.arange(len(x))
        q = rotated((x @ self._weight("self_attn.q_proj").T).reshape(len(x), QUERY_HEADS, HEAD_DIM), positions)[-1]
        k = rotated((x @ self._weight("self_attn.k_proj").T).reshape(len(x), KV_HEADS, HEAD_DIM), positions)
        v = (x @ self._weight("self_attn.v_proj").T).reshape(len(x), KV_HEADS, HEAD_DIM)
        attended = []
        for head, query in enumerate(q):
            group = head // (QUERY_HEADS // KV_HEADS)
            scores = k[:, group] @ query * HEAD_DIM**-0.5
            weights = np.exp(scores - scores.max())
            attended.append(weights @ v[:, group] / weights.sum())
        residual = (normed if self._layout.is_residual_normed else features)[-1]
        y = residual + self._weight("self_attn.o_proj") @ np.concatenate(attended)
        z = self._norm(y, "post_attention_layernorm")
        gate, up = self._weight("mlp.gate_proj") @ z, self._weight("mlp.up_proj") @ z
        return y + self._weight("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)

    def _weight(self, name: str) -> np.ndarray:
        return self._tensors[f"{name}.weight"].astype(np.float64)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * self._weight(name)


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    angles = positions[:, None, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
