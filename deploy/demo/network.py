"""Implements Qwen3 in plain jax.numpy, for training and for checking: whole sequences, one device, no cache.

In: parameters under their Hugging Face names (each weight `[out, in]`) and token ids. Out: logits or a loss. The result
equals that of transformers' `Qwen3ForCausalLM`; tests/deploy/test_demo_model.py compares the two.

Letters: B sequences, T tokens, D embed, N query heads, K kv heads, H head dim, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Parameters = Mapping[str, jax.Array]
RMS_NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The sizes of the network; `export.py` writes them as config.json."""

    vocabulary_tokens: int = 2048
    num_layers: int = 6
    embed_dim: int = 192
    mlp_dim: int = 512
    num_query_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10_000.0
    max_context_tokens: int = 1024


def parameter_shapes(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by its Hugging Face name; the output projection is the embedding (tied)."""
    embed, head, mlp = config.embed_dim, config.head_dim, config.mlp_dim
    query, kv = config.num_query_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary_tokens, embed),
        "model.norm.weight": (embed,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (embed,),
        "self_attn.q_proj.weight": (query, embed),
        "self_attn.k_proj.weight": (kv, embed),
        "self_attn.v_proj.weight": (kv, embed),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.o_proj.weight": (embed, query),
        "post_attention_layernorm.weight": (embed,),
        "mlp.gate_proj.weight": (mlp, embed),
        "mlp.up_proj.weight": (mlp, embed),
        "mlp.down_proj.weight": (embed, mlp),
    }
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def num_parameters(parameters: Parameters) -> int:
    return sum(value.size for value in parameters.values())


def init_parameters(key: jax.Array, config: NetworkConfig) -> dict[str, jax.Array]:
    """Returns float32 parameters: norms are 1, matrices normal(0, 0.02).

    The standard deviation of the last matrix of each branch is divided by sqrt(2 * layers).
    """
    shapes = parameter_shapes(config)
    keys = jax.random.split(key, len(shapes))
    parameters = {}
    for (name, shape), parameter_key in zip(shapes.items(), keys, strict=True):
        if len(shape) == 1:
            parameters[name] = jnp.ones(shape, jnp.float32)
        else:
            is_branch_end = "o_proj" in name or "down_proj" in name
            scale = 0.02 / (2 * config.num_layers) ** 0.5 if is_branch_end else 0.02
            parameters[name] = scale * jax.random.normal(parameter_key, shape, jnp.float32)
    return parameters


def forward(
    parameters: Parameters,
    ids_bt: jax.Array,
    config: NetworkConfig,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Computes the logits, float32 [B, T, V], with matmuls in the parameters' type and norms and softmax in float32.

    Dropout, on the embedding and on each residual branch, applies only when `dropout_key` is given.
    """
    return forward_with_inputs(parameters, ids_bt, config, dropout_rate=dropout_rate, dropout_key=dropout_key)[0]


def forward_with_inputs(
    parameters: Parameters,
    ids_bt: jax.Array,
    config: NetworkConfig,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes the logits as `forward`, and the input of each layer, [B, T, D]."""
    num_dropouts = 1 + 2 * config.num_layers
    keys = iter([None] * num_dropouts if dropout_key is None else jax.random.split(dropout_key, num_dropouts))

    embedding_vd = parameters["model.embed_tokens.weight"]
    # A matmul with one-hot rows looks up the tokens like an index, but its gradient needs no contended scatter-add.
    one_hot_btv = jax.nn.one_hot(ids_bt, config.vocabulary_tokens, dtype=embedding_vd.dtype)
    x = _dropout(one_hot_btv @ embedding_vd, next(keys), dropout_rate)
    rotation = _rotation(ids_bt.shape[1], config)
    inputs = []
    for index in range(config.num_layers):
        inputs.append(x)
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        branch = _attention(_rms_norm(x, layer["input_layernorm.weight"]), layer, rotation, config)
        x = x + _dropout(branch, next(keys), dropout_rate)
        branch = _mlp(_rms_norm(x, layer["post_attention_layernorm.weight"]), layer)
        x = x + _dropout(branch, next(keys), dropout_rate)
    x = _rms_norm(x, parameters["model.norm.weight"])
    return jnp.einsum("btd,vd->btv", x, embedding_vd, preferred_element_type=jnp.float32), inputs


def token_losses(logits_btv: jax.Array, targets_bt: jax.Array) -> jax.Array:
    """Returns the negative log-likelihood of each target in nats, float32 [B, T]."""
    is_target_btv = jnp.arange(logits_btv.shape[-1]) == targets_bt[..., None]
    return jax.nn.logsumexp(logits_btv, axis=-1) - jnp.where(is_target_btv, logits_btv, 0).sum(axis=-1)


def _attention(
    x_btd: jax.Array, layer: Parameters, rotation: tuple[jax.Array, jax.Array], config: NetworkConfig
) -> jax.Array:
    def heads(name: str, num_heads: int) -> jax.Array:
        projected = x_btd @ layer[f"self_attn.{name}_proj.weight"].T
        return projected.reshape(*x_btd.shape[:2], num_heads, config.head_dim)

    query = _rotate(_rms_norm(heads("q", config.num_query_heads), layer["self_attn.q_norm.weight"]), rotation)
    key = _rotate(_rms_norm(heads("k", config.num_kv_heads), layer["self_attn.k_norm.weight"]), rotation)
    value = heads("v", config.num_kv_heads)
    # cuDNN's fused attention accepts only 16-bit inputs; it is what makes training on long windows fast.
    is_fused = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    attended = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation="cudnn" if is_fused else "xla"
    )
    return attended.reshape(*x_btd.shape[:2], -1) @ layer["self_attn.o_proj.weight"].T


def _mlp(x_btd: jax.Array, layer: Parameters) -> jax.Array:
    gate = jax.nn.silu(x_btd @ layer["mlp.gate_proj.weight"].T)
    return (gate * (x_btd @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + RMS_NORM_EPSILON)
    return weight * normed.astype(x.dtype)


def _rotation(num_tokens: int, config: NetworkConfig) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of the rotary angles, float32 [T, 1, H / 2]."""
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, jnp.float32) / config.head_dim)
    angles = jnp.arange(num_tokens, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies the rotary embedding that pairs dimension i with i + H / 2 (Hugging Face's `rotate_half`)."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


def _dropout(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0).astype(x.dtype)
