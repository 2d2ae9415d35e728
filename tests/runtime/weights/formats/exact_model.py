"""The forward pass of Qwen3 in float64, and the same of our model on virtual devices."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshserve.kernels.linear import implementation
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.kernels.paged_attention import implementation as attention
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model.strategies import StepInputs, forward
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.mesh import make_mesh, partition_spec

# What happens to the inputs [T, K] of a projection, by its last name such as "down_proj".
RoundInputs = Callable[[np.ndarray, str], np.ndarray]
# What happens to keys and values [T, K, H] when they are stored.
RoundCache = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def exact_logits(
    weights: Mapping[str, np.ndarray],
    raw: Mapping[str, Any],
    token_ids: list[int],
    rounded: RoundInputs = lambda x, projection: x,
    rounded_cache: RoundCache = lambda k, v: (k, v),
) -> np.ndarray:
    """Returns the logits [T, V] of one prompt, computed in float64."""
    head_dim, num_kv_heads, eps = raw["head_dim"], raw["num_key_value_heads"], raw["rms_norm_eps"]
    positions = np.arange(len(token_ids))
    angles = positions[:, None] * raw["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weights[name]

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return rounded(x, name.rpartition(".")[2]) @ weights[f"{name}.weight"].T

    def rotate(x: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        normed = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            project(normed, f"{prefix}.self_attn.{part}_proj").reshape(len(x), -1, head_dim) for part in ("q", "k", "v")
        )
        q = rotate(norm(q, f"{prefix}.self_attn.q_norm.weight"))
        k = rotate(norm(k, f"{prefix}.self_attn.k_norm.weight"))
        k, v = rounded_cache(k, v)
        k, v = (np.repeat(heads, q.shape[1] // num_kv_heads, axis=1) for heads in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * head_dim**-0.5
        scores = np.where(positions[:, None] >= positions, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        attended = np.einsum("hts,shd->thd", shares, v).reshape(len(x), -1)
        x = x + project(attended, f"{prefix}.self_attn.o_proj")
        normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (project(normed, f"{prefix}.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + project(gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj")
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


def our_logits(
    directory: Path,
    token_ids: list[int],
    tp: int,
    *,
    dtype: str = "float32",
    linear: str = "xla",
    quantize: str = "none",
    kv_dtype: str = "",
    fp8_head: bool = False,
) -> np.ndarray:
    """Returns the logits [T, V] that the served model computes for one prompt in one step."""
    config = read_model(directory / "config.json", quantize, fp8_head=fp8_head)
    mesh, layout = make_mesh(tp), model_layout(config, tp)
    structure, params = load_model(directory, config, layout, mesh, jnp.dtype(dtype))
    page_size = 16
    num_pages = -(-len(token_ids) // page_size)
    cache = jnp.zeros(
        (config.num_layers, num_pages, layout.num_groups, 2, page_size, config.head_dim), kv_dtype or dtype
    )
    batch = PagedBatch(
        positions=jnp.arange(len(token_ids)),
        token_request=jnp.zeros(len(token_ids), jnp.int32),
        page_table=jnp.arange(num_pages)[None, ::-1],
    )
    kernels = Kernels(attend=attention("reference"), linear=implementation(linear))

    def logits(params: nnx.State, cache: jax.Array) -> jax.Array:
        model = nnx.merge(structure, params)
        step = StepInputs(jnp.asarray(token_ids), batch, kernels.products, wanted=jnp.arange(len(token_ids)))
        return model.logits(forward(model, kernels, cache, step).wanted)

    kv_heads = partition_spec((None, None, "kv_heads", None, None, None))
    program = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(specs_of(params), kv_heads),
        out_specs=partition_spec((None, "vocab")),
        check_vma=False,
    )
    # Many tokens take longer to compute than optimising the program does; see tests/conftest.py.
    options = {"xla_backend_optimization_level": 1} if len(token_ids) >= 256 else None
    logits = jax.jit(program, compiler_options=options)(
        params, jax.device_put(cache, jax.NamedSharding(mesh, kv_heads))
    )
    return np.asarray(logits)[:, : config.vocab_size]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the norm of the error over that of the expected values."""
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))
