"""Reference implementation of a decode step's layers in plain jax.numpy, for any backend and float type."""

from typing import Any

import jax
import jax.numpy as jnp

from meshserve.kernels.experts import ExpertWeights
from meshserve.kernels.experts import reference as expert_reference
from meshserve.kernels.linear import layer_of
from meshserve.kernels.p2p import reference as p2p_reference
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.kernels.paged_attention.storage import to_cache
from meshserve.kernels.router.reference import route

from .contract import DecodeBatch, LayerSettings, LayerWeights


def rms_norm(x: jax.Array, gain: jax.Array, epsilon: float) -> jax.Array:
    """Normalizes x over the last axis. Statistics are float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * gain.astype(jnp.float32)).astype(x.dtype)


def project(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiplies x [B, in] by matrix [out, in] transposed. Sums are float32; the result has x's dtype."""
    product = jnp.einsum("bi,oi->bo", x, matrix, precision="highest", preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, inverse_frequencies: jax.Array, rotary_scale: float) -> jax.Array:
    """Applies the rotary position embedding to x [B, ..., H], which pairs element i with i + H / 2."""
    angles = jnp.maximum(positions, 0).astype(jnp.float32)[:, None] * inverse_frequencies
    angles = angles.reshape(angles.shape[:1] + (1,) * (x.ndim - 2) + angles.shape[1:])
    cosine, sine = jnp.cos(angles) * rotary_scale, jnp.sin(angles) * rotary_scale
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(x.dtype)


def qkv(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: DecodeBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layer: int,
) -> tuple[jax.Array, jax.Array]:
    """See `DecodeKernels`."""
    _, num_pages, kv_heads, _, page_size, head_dim = cache.shape
    normed = rms_norm(x, weights.input_norm[layer], settings.epsilon)
    matrix = layer_of(weights.qkv, layer).reshape(-1, x.shape[1])
    heads = project(normed, matrix).reshape(x.shape[0], kv_heads, -1, head_dim)
    q = rms_norm(heads[:, :, :-2], weights.q_norm[layer], settings.epsilon)
    k = rms_norm(heads[:, :, -2], weights.k_norm[layer], settings.epsilon)
    q = rotate(q, batch.positions, inverse_frequencies, settings.rotary_scale)
    k = rotate(k, batch.positions, inverse_frequencies, settings.rotary_scale)
    positions = jnp.maximum(batch.positions, 0)
    page = jnp.take_along_axis(batch.page_table, (positions // page_size)[:, None], axis=1)[:, 0]
    page = jnp.where(batch.positions < 0, num_pages, page)  # out of range, so the write is dropped
    pair = to_cache(jnp.stack([k, heads[:, :, -1]], axis=2), cache.dtype)  # [B, K, 2, H]
    return q, cache.at[layer, page, :, :, positions % page_size].set(pair, mode="drop")


def attention(
    q: jax.Array, cache: jax.Array, batch: DecodeBatch, *, settings: LayerSettings, layer: int | jax.Array
) -> jax.Array:
    """See `DecodeKernels`. This implementation gathers every page of the table."""
    _, num_pages, kv_heads, _, page_size, head_dim = cache.shape
    num_requests, max_pages = batch.page_table.shape
    pages = cache[layer, jnp.clip(batch.page_table, 0, num_pages - 1)]  # [B, pages, K, 2, S, H]
    pages = pages.transpose(3, 0, 2, 1, 4, 5).reshape(2, num_requests, kv_heads, max_pages * page_size, head_dim)
    is_seen = jnp.arange(max_pages * page_size)[None, :] <= batch.positions[:, None]  # [B, tokens]
    k, v = jnp.where(is_seen[:, None, :, None], pages, 0).astype(jnp.float32)
    scores = jnp.einsum("bkgh,bkth->bkgt", q.astype(jnp.float32), k, precision="highest") * settings.softmax_scale
    scores = jnp.where(is_seen[:, None, None, :], scores, -jnp.inf)
    probabilities = jnp.where(batch.positions[:, None, None, None] < 0, 0.0, jax.nn.softmax(scores, axis=-1))
    attended = jnp.einsum("bkgt,bkth->bkgh", probabilities, v, precision="highest")
    return attended.reshape(num_requests, -1).astype(q.dtype)


def output(attended: jax.Array, weights: LayerWeights, residual: jax.Array | None, *, layer: int) -> jax.Array:
    """See `DecodeKernels`."""
    product = project(attended, layer_of(weights.o, layer))
    return product if residual is None else residual + product


def gate_up(x: jax.Array, weights: LayerWeights, *, settings: LayerSettings, layer: int) -> jax.Array:
    """See `DecodeKernels`."""
    normed = rms_norm(x, weights.post_norm[layer], settings.epsilon)
    gate, up = (project(normed, matrix).astype(jnp.float32) for matrix in layer_of(weights.gate_up, layer))
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def down(activated: jax.Array, weights: LayerWeights, residual: jax.Array | None, *, layer: int) -> jax.Array:
    """See `DecodeKernels`."""
    product = project(activated, layer_of(weights.down, layer))
    return product if residual is None else residual + product


def routed_experts(
    x: jax.Array, weights: LayerWeights, batch: DecodeBatch, *, settings: LayerSettings, layer: int
) -> tuple[jax.Array, jax.Array]:
    """Normalizes x [B, D] by post_norm and chooses experts by the router.

    Returns:
      What the experts add to x, and the choices [B, k], -1 for padding.
    """
    assert weights.router is not None and settings.router is not None
    normed, router = rms_norm(x, weights.post_norm[layer], settings.epsilon), weights.router[layer]
    routing = route(normed, router, settings.router, batch.positions)
    stacks = ExpertWeights(weights.gate_up, weights.down)
    output = expert_reference.experts(normed, stacks, routing, layer=layer, num_experts=router.shape[0])
    return output, routing.experts


def decode_layers(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: DecodeBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layers: range | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """See `DecodeKernels`."""

    def add(residual: jax.Array, share: jax.Array) -> jax.Array:
        return residual + (share if settings.p2p is None else p2p_reference.p2p_all_reduce(share, settings.p2p))

    all_chosen = []
    for layer in layers if layers is not None else range(weights.qkv.shape[0]):
        q, cache = qkv(x, weights, cache, batch, inverse_frequencies, settings=settings, layer=layer)
        x = add(x, output(attention(q, cache, batch, settings=settings, layer=layer), weights, None, layer=layer))
        if weights.router is not None:
            share, chosen = routed_experts(x, weights, batch, settings=settings, layer=layer)
            x = add(x, share)
            all_chosen.append(chosen)
        else:
            x = add(x, down(gate_up(x, weights, settings=settings, layer=layer), weights, None, layer=layer))
    return x, cache, jnp.stack(all_chosen) if all_chosen else None


def prompt_layers(
    x: jax.Array,
    weights: LayerWeights,
    cache: jax.Array,
    batch: PagedBatch,
    inverse_frequencies: jax.Array,
    *,
    settings: LayerSettings,
    layers: range | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `DecodeKernels`. Here, a layer writes all keys and values before any token attends."""
    tokens: Any = batch._replace(page_table=batch.page_table[batch.token_request])
    x, cache, _ = decode_layers(x, weights, cache, tokens, inverse_frequencies, settings=settings, layers=layers)
    return x, cache
