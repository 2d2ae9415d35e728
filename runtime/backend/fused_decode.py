"""Runs the decoder layers of a small step with the fused decode kernels, on devices that have them.

A step of few tokens is bound by the bandwidth of the weights, so the fewer kernels it is split into, the faster. On one
device, or on a mesh with P2P access, a single call runs all layers. On other meshes, each layer is split at its two
all-reduces. Steps of more decodes, whose products are XLA's, only use the kernels' attention.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.decode_layers import DecodeBatch, DecodeKernels, LayerSettings, LayerWeights
from meshserve.kernels.p2p import MAX_BYTES, P2PGroup
from meshserve.kernels.paged_attention import PagedAttention, PagedBatch
from meshserve.sharding.mesh import TENSOR_AXIS

from ..model_files.model_config import ModelConfig


class FusedOptions(NamedTuple):
    """Options of `run_layers`.

    `kind` is "decodes", "drafts" if a request may have several tokens, which each read its pages, or "prompts", on one
    device and without experts. For prompts, the caller runs the last layer, whose output it needs for some tokens.
    """

    p2p: P2PGroup | None  # P2P access between the devices of the mesh, if available
    kind: str
    captured: tuple[int, ...]  # layers, ascending, whose inputs are wanted
    inverse_frequencies: np.ndarray  # [H / 2] float32, of the rotary position embedding


def run_layers(
    config: ModelConfig,
    weights: LayerWeights,
    x: jax.Array,
    cache: jax.Array,
    batch: PagedBatch,
    kernels: DecodeKernels,
    options: FusedOptions,
) -> tuple[jax.Array, jax.Array, jax.Array | None, list[jax.Array]]:
    """Runs the layers of a small step.

    Args:
      config: The model.
      weights: Stacked weights of all layers.
      x: [T, D], hidden states.
      cache: [L, P, K, 2, S, H], the KV cache.
      batch: Where each token belongs.
      kernels: The fused decode kernels.
      options: What else there is to know.

    Returns:
      The hidden states before the final norm and the updated cache, in the same shapes; the experts that tokens chose,
      [L, T, k], -1 for padding, if the layers have any; and the inputs of the captured layers.
    """
    tokens = _decode_batch(batch)
    settings = LayerSettings(
        epsilon=config.rms_norm_eps,
        softmax_scale=config.head_dim**-0.5,
        rotary_scale=config.rope.attention_factor,
        router=None if config.experts is None else config.experts.router,
        has_drafts=options.kind == "drafts",
        p2p=options.p2p if x.nbytes <= MAX_BYTES else None,
    )
    frequencies = jnp.asarray(options.inverse_frequencies)
    inputs: list[jax.Array] = []
    is_prompts = options.kind == "prompts"
    if jax.lax.axis_size(TENSOR_AXIS) == 1 or settings.p2p is not None:
        choices: list[jax.Array] = []
        for start, stop in itertools.pairwise((0, *options.captured, config.num_layers - is_prompts)):
            layers = range(start, stop)
            if layers and is_prompts:
                x, cache = kernels.prompt_layers(
                    x, weights, cache, batch, frequencies, settings=settings, layers=layers
                )
            elif layers:
                x, cache, chosen = kernels.decode_layers(
                    x, weights, cache, tokens, frequencies, settings=settings, layers=layers
                )
                choices += [] if chosen is None else [chosen]
            inputs.append(x)
        all_choices = jnp.concatenate(choices) if len(choices) > 1 else next(iter(choices), None)
        return x, cache, all_choices, inputs[:-1]
    for layer in range(config.num_layers):
        inputs += [x] * options.captured.count(layer)
        q, cache = kernels.qkv(x, weights, cache, tokens, frequencies, settings=settings, layer=layer)
        attended = kernels.attention(q, cache, tokens, settings=settings, layer=layer)
        x = x + jax.lax.psum(kernels.output(attended, weights, None, layer=layer), TENSOR_AXIS)
        activated = kernels.gate_up(x, weights, settings=settings, layer=layer)
        x = x + jax.lax.psum(kernels.down(activated, weights, None, layer=layer), TENSOR_AXIS)
    return x, cache, None, inputs


def attention_of_decodes(epsilon: float, batch: PagedBatch, kernels: DecodeKernels) -> PagedAttention:
    """Returns the attention of the fused decode kernels, for a step of at most one token per request.

    It multiplies each page with the few query rows that there are, where the attention of steps with prefill multiplies
    with whole tiles. That takes as long, but more power, which is what limits steps of many decodes
    (docs/log/first_days.md).
    """
    tokens = _decode_batch(batch)

    def attend(q: jax.Array, cache: jax.Array, batch: PagedBatch, *, layer: int | jax.Array, scale: float) -> jax.Array:
        settings = LayerSettings(epsilon=epsilon, softmax_scale=scale)
        return kernels.attention(q, cache, tokens, settings=settings, layer=layer).reshape(q.shape)

    return attend


def _decode_batch(batch: PagedBatch) -> DecodeBatch:
    return DecodeBatch(batch.positions, batch.page_table[batch.token_request])
