"""Implements the demo model's EAGLE-3 head in plain jax.numpy, for training and checking: whole sequences, no pages.

In: hidden states and embedded tokens of the served model. Out: logits of draft tokens, given the tokens before them.
`runtime/draft/heads/eagle3.py` is what serves it.

Letters: B sequences, T tokens, R roots (positions after which drafts are made), D embed, K kv heads, G query heads of
each, H head dim, v the head's vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file

from .network import Parameters

LAYERS_READ = (1, 3, 5)  # those of the demo model's six whose inputs the head reads
PREFIX = "midlayer."
EPSILON = 1e-6
Keys = tuple[jax.Array, jax.Array]  # keys and values, [B, R, K, H] each


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """The head's sizes."""

    vocabulary_tokens: int = 1024  # the most frequent ones of the training text
    mlp_dim: int = 512
    num_query_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10_000.0


def load_head(folder: Path) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Returns the float32 parameters in a head's directory, and the token ids [v] of its vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    offsets = np.asarray(tensors.pop("d2t"))
    return {name: value.astype(jnp.float32) for name, value in tensors.items()}, offsets + np.arange(len(offsets))


def merged_features(head: Parameters, states: Sequence[jax.Array]) -> jax.Array:
    """Returns the features [B, T, D] of the inputs [B, T, D] of each layer read."""
    return jnp.concatenate(states, axis=-1) @ head["fc.weight"].T


def draft_step(
    head: Parameters, tokens: jax.Array, feature: jax.Array, step: int, chain: Sequence[Keys], config: HeadSizes
) -> tuple[jax.Array, Keys]:
    """Runs the layer once for each root.

    Args:
      head: The head's parameters.
      tokens: [B, R, D], the embedded token after each root, or draft token number `step`.
      feature: [B, R, D], of the root, or the output of the step before.
      step: The number of steps before.
      chain: Their keys and values.
      config: The sizes.

    Returns:
      The output [B, R, D], which is the feature of the next step, and this step's keys and values.
    """
    x = jnp.concatenate(
        [_norm(tokens, head, f"{PREFIX}input_layernorm"), _norm(feature, head, f"{PREFIX}hidden_norm")], axis=-1
    )
    positions = jnp.arange(tokens.shape[1]) + step
    q, k, v = (_heads(x, head, name, config) for name in "qkv")
    q, k = _rotate(q, positions, config), _rotate(k, positions, config)
    attended = _attend(q, [*chain, (k, v)], config) @ head[f"{PREFIX}self_attn.o_proj.weight"].T
    feature = feature + attended
    normed = _norm(feature, head, f"{PREFIX}post_attention_layernorm")
    gate = jax.nn.silu(normed @ head[f"{PREFIX}mlp.gate_proj.weight"].T)
    up = normed @ head[f"{PREFIX}mlp.up_proj.weight"].T
    return feature + (gate * up) @ head[f"{PREFIX}mlp.down_proj.weight"].T, (k, v)


def head_logits(head: Parameters, feature: jax.Array) -> jax.Array:
    """Returns the logits [B, R, v] of the draft token after an output [B, R, D]."""
    return _norm(feature, head, "norm") @ head["lm_head.weight"].T


def draft_logits(
    head: Parameters, states: Sequence[jax.Array], embedded: jax.Array, config: HeadSizes, num_drafts: int
) -> list[jax.Array]:
    """Returns the logits of each draft token after each position, [B, R, v], if those before are the sequence's.

    Args:
      head: The head's parameters.
      states: The inputs of each layer read, [B, T, D].
      embedded: [B, T, D], the embedded tokens.
      config: The sizes.
      num_drafts: How many draft tokens; R is T - num_drafts - 1.
    """
    num_roots = embedded.shape[1] - num_drafts - 1
    feature = merged_features(head, [state[:, :num_roots] for state in states])
    chain: list[Keys] = []
    logits = []
    for step in range(num_drafts):
        tokens = embedded[:, step + 1 : step + 1 + num_roots]
        feature, keys = draft_step(head, tokens, feature, step, chain, config)
        chain.append(keys)
        logits.append(head_logits(head, feature))
    return logits


def _heads(x: jax.Array, head: Parameters, name: str, config: HeadSizes) -> jax.Array:
    rows = x @ head[f"{PREFIX}self_attn.{name}_proj.weight"].T
    return rows.reshape(*x.shape[:2], -1, config.head_dim)


def _attend(q: jax.Array, chain: Sequence[Keys], config: HeadSizes) -> jax.Array:
    """Attends to the first keys of the chain up to the own position, and to the further ones at the own position."""
    (k, v), *further = chain
    batch, num_roots = q.shape[:2]
    grouped = q.reshape(batch, num_roots, config.num_kv_heads, -1, config.head_dim) * config.head_dim**-0.5
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k)
    scores = jnp.where(jnp.tri(num_roots, dtype=bool), scores, -jnp.inf)
    own = [jnp.einsum("btkgh,btkh->bkgt", grouped, key)[..., None] for key, _ in further]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1)
    attended = jnp.einsum("bkgts,bskh->btkgh", weights[..., :num_roots], v)
    for index, (_, value) in enumerate(further):
        attended += jnp.einsum("bkgt,btkh->btkgh", weights[..., num_roots + index], value)
    return attended.reshape(batch, num_roots, -1)


def _norm(x: jax.Array, head: Parameters, name: str) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * head[f"{name}.weight"]


def _rotate(x: jax.Array, positions: jax.Array, config: HeadSizes) -> jax.Array:
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2) / config.head_dim)
    angles = positions[:, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
