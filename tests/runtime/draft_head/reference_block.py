"""A block drafter in plain numpy and float64, from the formulas, over whole sequences; and random ones in files.

Sources of the formulas: Chen et al., 2026 (arXiv 2602.06036), and what the published files mean to their authors' code.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .reference_head import EMBED, EPSILON, HEAD_DIM, KV_HEADS, MLP, QUERY_HEADS, THETA, rotated

VOCAB, BLOCK_SIZE, MASK = 96, 6, 17


@dataclass(frozen=True)
class BlockLayout:
    """How a block drafter is published."""

    is_nested: bool  # as in vLLM's speculators
    layers_read: tuple[int, ...]  # of the served model: those whose inputs it reads
    num_layers: int
    has_whole_vocabulary: bool

    def config(self, served_vocab_size: int) -> dict[str, Any]:
        layer = {
            "hidden_size": EMBED, "intermediate_size": MLP, "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPSILON, "rope_theta": THETA,
            "max_position_embeddings": 512, "num_hidden_layers": self.num_layers, "vocab_size": served_vocab_size,
            "tie_word_embeddings": False, "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
            "layer_types": ["full_attention"] * self.num_layers,
        }  # fmt: skip
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


DFLASH = BlockLayout(False, (1, 2, 4), 3, True)
DFLASH_SMALL = BlockLayout(False, (3,), 1, True)
SPECULATORS = BlockLayout(True, (0, 2, 3, 4), 2, False)


def save_block_drafter(
    directory: Path, layout: BlockLayout, served_vocab_size: int, seed: int = 5
) -> dict[str, np.ndarray]:
    """Writes a random block drafter, and returns its tensors."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.5 * shape[-1] ** -0.5).astype(np.float32)

    def gain(size: int = EMBED) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "fc.weight": matrix(EMBED, len(layout.layers_read) * EMBED),
        "hidden_norm.weight": gain(),
        "norm.weight": gain(),
    }
    for prefix in (f"layers.{index}." for index in range(layout.num_layers)):
        tensors |= {
            f"{prefix}input_layernorm.weight": gain(),
            f"{prefix}self_attn.q_proj.weight": matrix(QUERY_HEADS * HEAD_DIM, EMBED),
            f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, EMBED),
            f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, EMBED),
            f"{prefix}self_attn.q_norm.weight": gain(HEAD_DIM),
            f"{prefix}self_attn.k_norm.weight": gain(HEAD_DIM),
            f"{prefix}self_attn.o_proj.weight": matrix(EMBED, QUERY_HEADS * HEAD_DIM),
            f"{prefix}post_attention_layernorm.weight": gain(),
            f"{prefix}mlp.gate_proj.weight": matrix(MLP, EMBED),
            f"{prefix}mlp.up_proj.weight": matrix(MLP, EMBED),
            f"{prefix}mlp.down_proj.weight": matrix(EMBED, MLP),
        }
    if not layout.has_whole_vocabulary:
        chosen = np.sort(rng.choice(served_vocab_size, VOCAB, replace=False))
        tensors["d2t"] = (chosen - np.arange(VOCAB)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(served_vocab_size), chosen)
        tensors["lm_head.weight"] = matrix(VOCAB, EMBED)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(layout.config(served_vocab_size)))
    return tensors


class ReferenceBlock:
    """Drafts greedily.

    Args:
      tensors: The drafter's.
      layout: How they are meant.
      embedding, head: The served model's.
    """

    def __init__(self, tensors: dict[str, np.ndarray], layout: BlockLayout, embedding: np.ndarray, head: np.ndarray):
        self._tensors, self._layout = tensors, layout
        self._embedding = embedding.astype(np.float64)
        self._head = tensors.get("lm_head.weight", head).astype(np.float64)

    def draft(self, token_ids: list[int], hidden: list[np.ndarray], num_drafts: int) -> list[int]:
        """Returns draft tokens after known ones.

        Args:
          token_ids: The known tokens; the served model has computed all but the last.
          hidden: Of each layer read, its inputs [len(token_ids) - 1, D] or more.
          num_drafts: How many.
        """
        count = len(token_ids) - 1
        merged = np.concatenate([states[:count] for states in hidden], axis=1).astype(np.float64)
        features = self._norm(merged @ self._weight("fc").T, "hidden_norm")
        x = self._embedding[[token_ids[-1], *[MASK] * num_drafts]]
        for index in range(self._layout.num_layers):
            x = self._layer(f"layers.{index}.", x, features)
        logits = self._norm(x, "norm")[1:] @ self._head.T
        offsets = self._tensors.get("d2t", np.zeros(len(self._head), int))
        return [int(best + offsets[best]) for best in logits.argmax(axis=1)]

    def _layer(self, prefix: str, x: np.ndarray, features: np.ndarray) -> np.ndarray:
        normed = self._norm(x, f"{prefix}input_layernorm")
        both = np.concatenate([features, normed])
        positions = np.arange(len(both))
        heads = {
            name: (rows @ self._weight(f"{prefix}self_attn.{name}_proj").T).reshape(len(rows), -1, HEAD_DIM)
            for name, rows in (("q", normed), ("k", both), ("v", both))
        }
        q = rotated(self._norm(heads["q"], f"{prefix}self_attn.q_norm"), positions[len(features) :])
        k = rotated(self._norm(heads["k"], f"{prefix}self_attn.k_norm"), positions)
        attended = []
        for head in range(QUERY_HEADS):
            group = head // (QUERY_HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, group].T * HEAD_DIM**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended.append(weights @ heads["v"][:, group] / weights.sum(axis=1, keepdims=True))
        y = x + np.concatenate(attended, axis=1) @ self._weight(f"{prefix}self_attn.o_proj").T
        z = self._norm(y, f"{prefix}post_attention_layernorm")
        gate, up = (z @ self._weight(f"{prefix}mlp.{name}_proj").T for name in ("gate", "up"))
        return y + (gate / (1 + np.exp(-gate)) * up) @ self._weight(f"{prefix}mlp.down_proj").T

    def _weight(self, name: str) -> np.ndarray:
        return self._tensors[f"{name}.weight"].astype(np.float64)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * self._weight(name)
