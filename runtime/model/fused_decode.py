"""The layers of a small step through the fused decode kernels, where the device has them.

A step of few tokens is a stream of weights: what counts is how few kernels it is cut into. On one device the whole
stack is one call, and so it is on each device of a mesh whose devices are peers; elsewhere each layer is cut at the two
sums over the shards.
"""

import jax
import jax.numpy as jnp

from meshserve.kernels.decode_layers import DecodeBatch, DecodeKernels, LayerSettings, LayerWeights
from meshserve.kernels.p2p import MAX_BYTES, P2PGroup
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.mesh import TENSOR_AXIS

from ..api.model_config import ModelConfig
from .rope import inverse_frequencies


def run_layers(
    config: ModelConfig,
    weights: LayerWeights,
    x: jax.Array,
    cache: jax.Array,
    batch: PagedBatch,
    kernels: DecodeKernels,
    p2p: P2PGroup | None = None,
) -> tuple[jax.Array, jax.Array]:
    """All layers of a step whose tokens are all decodes: no two of them are of one request.

    x [T, D] and the cache [L, P, K, 2, S, H] -> the same, before the final norm.
    """
    tokens = DecodeBatch(batch.positions, batch.page_table[batch.token_request])
    settings = LayerSettings(
        epsilon=config.rms_norm_eps,
        softmax_scale=config.head_dim**-0.5,
        rotary_scale=config.rope.attention_factor,
        p2p=p2p if x.nbytes <= MAX_BYTES else None,
    )
    frequencies = jnp.asarray(inverse_frequencies(config.rope, config.head_dim))
    if jax.lax.axis_size(TENSOR_AXIS) == 1 or settings.p2p is not None:
        return kernels.decode_layers(x, weights, cache, tokens, frequencies, settings=settings)
    for layer in range(config.num_layers):
        q, cache = kernels.qkv(x, weights, cache, tokens, frequencies, settings=settings, layer=layer)
        attended = kernels.attention(q, cache, tokens, settings=settings, layer=layer)
        x = x + jax.lax.psum(kernels.output(attended, weights, None, layer=layer), TENSOR_AXIS)
        activated = kernels.gate_up(x, weights, settings=settings, layer=layer)
        x = x + jax.lax.psum(kernels.down(activated, weights, None, layer=layer), TENSOR_AXIS)
    return x, cache
