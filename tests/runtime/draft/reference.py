"""What heads of all kinds have in common: formulas in plain numpy and float64, over whole sequences, and files."""

import abc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

EMBED, QUERY_HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, EPSILON, THETA = 48, 8, 2, 16, 80, 96, 1e-5, 5000.0
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Layout(abc.ABC):
    """How a head is published."""

    layers_read: tuple[int, ...]  # the served model's layers whose inputs it reads
    has_whole_vocabulary: bool = False
    embed_dim: int = EMBED

    @abc.abstractmethod
    def config(self, served_vocab_size: int) -> dict[str, Any]:
        """Returns its config.json."""

    @abc.abstractmethod
    def fill(self, random: "RandomTensors", served_vocab_size: int) -> None:
        """Adds its tensors, but for those of its vocabulary."""

    @abc.abstractmethod
    def reference(self, tensors: Tensors, embedding: np.ndarray, head: np.ndarray) -> "Reference":
        """Returns the formulas, given its tensors and the served model's tables."""

    def save(self, directory: Path, served_vocab_size: int, seed: int = 5) -> Tensors:
        """Writes a random head, and returns its tensors."""
        random = RandomTensors(seed, self.embed_dim)
        self.fill(random, served_vocab_size)
        if not self.has_whole_vocabulary:
            chosen = np.sort(random.rng.choice(served_vocab_size, VOCAB, replace=False))
            random.tensors["d2t"] = (chosen - np.arange(VOCAB)).astype(np.int64)
            random.tensors["t2d"] = np.isin(np.arange(served_vocab_size), chosen)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(random.tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self.config(served_vocab_size)))
        return random.tensors

    def layer_config(self, num_layers: int, served_vocab_size: int, model_type: str) -> dict[str, Any]:
        return {
            "hidden_size": self.embed_dim, "intermediate_size": MLP, "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPSILON, "rope_theta": THETA,
            "max_position_embeddings": 512, "num_hidden_layers": num_layers, "vocab_size": served_vocab_size,
            "tie_word_embeddings": False, "model_type": model_type, "hidden_act": "silu",
        }  # fmt: skip


class RandomTensors:
    """The tensors of a head, as they are drawn."""

    def __init__(self, seed: int, embed_dim: int):
        self.rng = np.random.default_rng(seed)
        self.tensors: Tensors = {}
        self._embed_dim = embed_dim

    def matrix(self, name: str, num_rows: int, num_columns: int) -> None:
        values = self.rng.standard_normal((num_rows, num_columns)) * 1.5 * num_columns**-0.5
        self.tensors[f"{name}.weight"] = values.astype(np.float32)

    def gain(self, name: str, size: int = 0) -> None:
        values = 1 + 0.2 * self.rng.standard_normal(size or self._embed_dim)
        self.tensors[f"{name}.weight"] = values.astype(np.float32)

    def layer(self, prefix: str, num_inputs: int) -> None:
        for name, num_rows in (("q", QUERY_HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.matrix(f"{prefix}self_attn.{name}_proj", num_rows * HEAD_DIM, num_inputs)
        self.matrix(f"{prefix}self_attn.o_proj", self._embed_dim, QUERY_HEADS * HEAD_DIM)
        self.gain(f"{prefix}input_layernorm")
        self.gain(f"{prefix}post_attention_layernorm")
        for name in ("gate", "up"):
            self.matrix(f"{prefix}mlp.{name}_proj", MLP, self._embed_dim)
        self.matrix(f"{prefix}mlp.down_proj", self._embed_dim, MLP)


class Reference(abc.ABC):
    """Drafts greedily."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors

    @abc.abstractmethod
    def draft(self, token_ids: list[int], hidden: list[np.ndarray], num_drafts: int) -> list[int]:
        """Returns draft tokens after known ones.

        Args:
          token_ids: The known tokens; the served model has computed all but the last.
          hidden: The inputs of each layer read, [len(token_ids) - 1, D] or more.
          num_drafts: How many.
        """

    def best(self, out: np.ndarray, head: np.ndarray) -> list[int]:
        """Returns the served model's id of the likeliest token of each row [N, D]."""
        best = (self.norm(out, "norm") @ head.astype(np.float64).T).argmax(axis=1)
        return (best + self._tensors["d2t"][best] if "d2t" in self._tensors else best).tolist()

    def attention(self, prefix: str, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns [N, D] for the last rows x [N, ...], which all see the whole context [M, ...]."""
        heads = {}
        for name, rows in (("q", x), ("k", context), ("v", context)):
            heads[name] = (rows @ self.weight(f"{prefix}{name}_proj").T).reshape(len(rows), -1, HEAD_DIM)
            if f"{prefix}{name}_norm.weight" in self._tensors:
                heads[name] = self.norm(heads[name], f"{prefix}{name}_norm")
        positions = np.arange(len(context))
        q, k = _rotated(heads["q"], positions[len(context) - len(x) :]), _rotated(heads["k"], positions)
        attended = []
        for head in range(QUERY_HEADS):
            group = head // (QUERY_HEADS // KV_HEADS)
            scores = q[:, head] @ k[:, group].T * HEAD_DIM**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended.append(weights @ heads["v"][:, group] / weights.sum(axis=1, keepdims=True))
        return np.concatenate(attended, axis=1) @ self.weight(f"{prefix}o_proj").T

    def mlp(self, prefix: str, y: np.ndarray) -> np.ndarray:
        z = self.norm(y, f"{prefix}post_attention_layernorm")
        gate, up = (z @ self.weight(f"{prefix}mlp.{name}_proj").T for name in ("gate", "up"))
        return y + (gate / (1 + np.exp(-gate)) * up) @ self.weight(f"{prefix}mlp.down_proj").T

    def merged(self, hidden: list[np.ndarray], count: int) -> np.ndarray:
        states = np.concatenate([states[:count] for states in hidden], axis=1)
        return states.astype(np.float64) @ self.weight("fc").T

    def weight(self, name: str) -> np.ndarray:
        return self._tensors[f"{name}.weight"].astype(np.float64)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * self.weight(name)


def _rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    angles = positions[:, None, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
