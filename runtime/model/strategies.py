"""The ways to run the layers of a step: one function for each, of which a bucket's program has one.

Step 6 of 10. In: the token ids of one step. Out: hidden states.

Decodes and prompts of few tokens run on the fused layers of GPUs. Other steps run the model's layers, unrolled on GPUs,
because XLA does not capture loops in command buffers; a loop compiles several times faster. Where devices divide pages,
`divided` puts the tokens of prompts in another order first.

All functions are written per shard and called inside `shard_map`.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.paged_attention import PagedBatch
from meshserve.kernels.paged_attention.context_split import by_remainder

from ..backend import fused_decode
from ..backend.kernels import Kernels
from ..backend.products import PlainProducts, Products
from ..backend.step_context import StepContext
from .layers.decoder import Decoder
from .layers.rope import inverse_frequencies
from .layers.stack import layer_weights


class StepInputs(NamedTuple):
    """The tokens of a step, and which results are wanted."""

    token_ids: jax.Array  # [T] int32
    batch: PagedBatch  # where each token belongs
    products: Products  # with what the tokens bring along
    # Indices [B] of the tokens whose logits are wanted, T for padding. The others skip the MLP of the last layer,
    # because no token attends to its output. None means that all tokens are wanted and that those of one request, which
    # are few, are consecutive.
    wanted: jax.Array | None = None
    has_drafts: bool = False  # a request may have several tokens though all are wanted
    captured: tuple[int, ...] = ()  # layers, ascending, whose inputs are wanted


class Forward(NamedTuple):
    """Result of running all layers."""

    wanted: jax.Array  # [B, D], hidden states of the wanted tokens after all layers
    hidden: jax.Array | None  # [T, D], before the MLP of the last layer; None for fused decodes
    cache: jax.Array
    chosen: list[jax.Array]  # experts that tokens chose, [T, k] of a layer or [layers, T, k], -1 for padding
    captured: list[jax.Array]  # [T, D] each, the inputs of the captured layers


# Model, kernels, the KV cache [L, P, K, 2, S, H] with this shard's KV heads, and the step.
Strategy = Callable[[Decoder, Kernels, jax.Array, StepInputs], Forward]


def choose(model: Decoder, kernels: Kernels, num_tokens: int, *, is_decode: bool) -> Strategy:
    """Returns the strategy of steps of one shape. `is_decode` says that all tokens are wanted."""
    if kernels.fused(num_tokens, is_decode=is_decode) is not None:
        return fused_decodes if is_decode else fused_prompts
    is_loop = not kernels.is_unrolled and len(model.config.stacks) == 1
    strategy = looped if is_loop else unrolled
    return partial(divided, strategy) if model.cp > 1 and not is_decode else strategy


def forward(model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs) -> Forward:
    """Runs all layers with the strategy of the step's shape."""
    strategy = choose(model, kernels, len(step.token_ids), is_decode=step.wanted is None)
    return strategy(model, kernels, cache, step)


def fused_decodes(model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs) -> Forward:
    """Runs all layers on the fused decode kernels."""
    kind = "drafts" if step.has_drafts else "decodes"
    x, cache, choices, inputs = _run_fused(model, kernels, cache, step, kind)
    return Forward(x, None, cache, [] if choices is None else [choices], inputs)


def fused_prompts(model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs) -> Forward:
    """Runs all layers but the last on the fused kernels."""
    x, cache, _, inputs = _run_fused(model, kernels, cache, step, "prompts")
    context = _context(model, kernels, step)
    return _last_layer(model, x, cache, model.config.num_layers - 1, context, step, inputs)


def unrolled(model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs) -> Forward:
    """Runs one layer after the other, each with operations of its own in the program."""
    x, context = model.embed(step.token_ids, kernels.p2p_all_reduce), _context(model, kernels, step)
    last, inputs = model.config.num_layers - 1, []
    for layer in range(last + 1):
        inputs += [x] * step.captured.count(layer)
        if layer < last:
            x, cache = model.layer(layer)(x, cache, layer, context)
    return _last_layer(model, x, cache, last, context, step, inputs)


def looped(model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs) -> Forward:
    """Loops over layers that are alike. The loop is interrupted for each captured layer."""
    x, context = model.embed(step.token_ids, kernels.p2p_all_reduce), _context(model, kernels, step)
    last, experts = model.config.num_layers - 1, model.config.experts
    chosen = context.chosen
    assert chosen is not None

    def run_layer(
        layer: jax.Array, carry: tuple[jax.Array, jax.Array, list[jax.Array]]
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        x, cache, stacks = carry
        x, cache = model.layer(layer)(x, cache, layer, context)
        return x, cache, [stack.at[layer].set(chosen.pop()) for stack in stacks]

    stacks: list[jax.Array] = []
    if experts is not None:
        stacks = [jnp.zeros((last, x.shape[0], experts.num_chosen), jnp.int32)]
    inputs: list[jax.Array] = []
    for start, stop in itertools.pairwise((0, *step.captured, last)):
        if start < stop:
            x, cache, stacks = jax.lax.fori_loop(start, stop, run_layer, (x, cache, stacks))
        inputs.append(x)
    chosen += stacks
    # Its index is traced as in the loop, so that its weights are sliced in the same way; see `layers.stack`.
    return _last_layer(model, x, cache, jnp.int32(last), context, step, inputs[:-1])


def divided(strategy: Strategy, model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs) -> Forward:
    """Runs prompts with another strategy, in the order of tokens that divided pages need; see `by_remainder`."""
    assert step.wanted is not None
    moved = by_remainder(step.batch, model.cp)
    step = step._replace(
        wanted=moved.places.at[step.wanted].get(mode="fill", fill_value=len(step.token_ids)),
        token_ids=step.token_ids[moved.order],
        batch=moved.batch,
        products=step.products.take(moved.order),
    )
    found = strategy(model, kernels, cache, step)
    assert found.hidden is not None
    return found._replace(hidden=found.hidden[moved.places])


def _run_fused(
    model: Decoder, kernels: Kernels, cache: jax.Array, step: StepInputs, kind: str
) -> tuple[jax.Array, jax.Array, jax.Array | None, list[jax.Array]]:
    """Embeds the tokens and runs the fused layers; see `fused_decode.run_layers`."""
    assert kernels.decode is not None
    assert isinstance(step.products, PlainProducts), "fused layers multiply without what the tokens bring along"
    x = model.embed(step.token_ids, kernels.p2p_all_reduce)
    frequencies = inverse_frequencies(model.config.rope, model.config.head_dim)
    options = fused_decode.FusedOptions(kernels.p2p, kind, step.captured, frequencies)
    weights = layer_weights(nnx.state(model.layers))
    return fused_decode.run_layers(model.config, weights, x, cache, step.batch, kernels.decode, options)


def _context(model: Decoder, kernels: Kernels, step: StepInputs) -> StepContext:
    has_single_tokens = step.wanted is None and not step.has_drafts
    return model.context(kernels, step.batch, step.products, has_single_tokens=has_single_tokens)


def _last_layer(
    model: Decoder,
    x: jax.Array,
    cache: jax.Array,
    layer: int | jax.Array,
    context: StepContext,
    step: StepInputs,
    inputs: list[jax.Array],
) -> Forward:
    """Runs the last layer, whose MLP only the wanted tokens need. `inputs` are those of the captured layers."""
    hidden, cache = model.layer(layer).after_attention(x, cache, layer, context)
    chosen = context.chosen or []
    if step.wanted is None:
        return Forward(model.after_last_mlp(hidden, context.mlp), hidden, cache, chosen, inputs)
    of_wanted = context.mlp.take(step.wanted)
    return Forward(model.after_last_mlp(hidden[step.wanted], of_wanted), hidden, cache, chosen, inputs)
