"""Step 7 of 10, for requests that need more than the step's own sampler: logits processors and log-probabilities.

In: the logits of a step, and what `processor_batch` packed of its requests. Out: the tokens, sampled again from logits
that the families of this package and grammar masks have changed, and log-probabilities.

    run (the step; samples without processors)  ->  sample (here; its tokens replace those of the step)

These are separate programs, dispatched after the step, which is only affected in that its logits are an output. Steps
that need no processors consist of the first program alone. In a constrained step, only the sampling waits for the host:
the layers of step k+1 run while the host computes the grammar mask that follows from the token of step k.

`masks[i]` says which tokens the i-th sample of the plan (those of its decodes, its prefill chunks, and then its draft
tokens) may take: ceil(V / 32) words of uint32, token t in bit t % 32 of word t // 32. It is all ones for requests
without a grammar. If no token is allowed, the first one of the vocabulary is taken.

The state of a slot (`ProcessorState`) is written when a request is assigned to it; the program then counts the tokens
that it samples. A sample after draft tokens counts if these hold.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.sharding.mesh import TENSOR_AXIS

from ...api.sampling_params import MAX_LOGPROBS
from ...backend.step_context import MLPContext
from ..accepted_drafts import DraftRows
from ..packing import DTYPES
from ..sampling import SamplingBatch, local_token_ids, processed_logits
from . import PROCESSORS
from .contract import ProcessorState
from .processor_batch import ADJUSTS, REPORTS_PROCESSED, SAMPLES, WORD_BITS, Logprobs, ProcessorShape, Sampled

_CHUNK_TOKENS = 128  # the top tokens are searched by the largest logit of each such chunk of the vocabulary
_BLOCK_TOKENS = 64  # prompt tokens whose logits are in memory at the same time


def sample_processed(
    state: ProcessorState[jax.Array],
    last_tokens: jax.Array,
    logits: jax.Array,
    packed: jax.Array,
    masks: jax.Array,
    *,
    shape: ProcessorShape,
    vocab_size: int,
    choose: Callable[[jax.Array, SamplingBatch, jax.Array], jax.Array],
) -> tuple[ProcessorState[jax.Array], jax.Array, Sampled[jax.Array]]:
    """Samples the tokens of a step again, after the logits processors. Written per shard.

    Args:
      state, last_tokens: consumed; the updated ones are returned.
      logits: [B, V / shards] float32, from the step.
      packed: the fields of `ProcessorShape.fields`.
      masks: [B, ceil(V / 32)] uint32, the same on every shard.
      choose: `sampling.sample` as a function of logits, parameters and mode.
    """
    fields = {name: packed[place].view(DTYPES.get(name, jnp.int32)) for name, place in shape.fields.items()}
    slots, flags = fields["slots"], fields["flags"]
    rows = DraftRows.unpacked(fields, shape.num_drafts)
    token_ids = local_token_ids(logits.shape[1])
    kept = ProcessorState(*(array.at[rows.state_slots].get(mode="clip") for array in state))
    kept = kept._replace(history=rows.counted(kept.history, token_ids[0]))
    columns = {name: values[:, None] for name, values in fields.items()}
    adjusted = logits
    for processor in PROCESSORS:
        adjusted = processor.apply(adjusted, kept, columns)
    allowed = jnp.where((flags & ADJUSTS != 0)[:, None], adjusted, logits)
    allowed = jnp.where(_local_bits(masks, logits.shape[1]), allowed, -jnp.inf)
    allowed = jnp.where(logits < jnp.inf, allowed, logits)  # a ban must not hide NaN from the sampler
    params = SamplingBatch.unpacked(fields)
    tokens = choose(allowed, params, fields["mode"][0])
    reports_processed = flags & REPORTS_PROCESSED != 0
    reported = jax.lax.cond(
        reports_processed.any(),
        lambda: jnp.where(reports_processed[:, None], processed_logits(allowed, params, vocab_size=vocab_size), logits),
        lambda: logits,
    )
    logprobs = jax.lax.cond(
        fields["has_logprobs"][0] != 0,
        partial(_logprobs, vocab_size=vocab_size),
        lambda logits, tokens: _no_logprobs(tokens, vocab_size),
        reported,
        tokens,
    )
    is_here = (tokens >= token_ids[0]) & (tokens <= token_ids[-1])
    counts = (flags & SAMPLES != 0) & (flags & ADJUSTS != 0) & is_here & rows.are_accepted(tokens)
    column = jnp.where(counts, tokens - token_ids[0], logits.shape[1])  # others lie outside and are dropped
    history = state.history.at[rows.state_slots, column].add(1, mode="drop")
    last_tokens = last_tokens.at[slots].set(tokens, mode="drop")
    return ProcessorState(history, state.bias), last_tokens, Sampled(tokens, logprobs)


def _local_bits(words: jax.Array, num_local: int) -> jax.Array:
    """Returns this shard's part, [B, V / shards] bool, of bits packed in words for the whole vocabulary."""
    num_words = num_local // WORD_BITS + 2  # a shard may begin and end within a word
    first = jax.lax.axis_index(TENSOR_AXIS) * num_local
    padded = jnp.pad(words, ((0, 0), (0, num_words + jax.lax.axis_size(TENSOR_AXIS))))
    local = jax.lax.dynamic_slice_in_dim(padded, first // WORD_BITS, num_words, axis=1)
    bits = (local[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1 != 0
    return jax.lax.dynamic_slice_in_dim(bits.reshape(len(words), -1), first % WORD_BITS, num_local, axis=1)


def _logprobs(logits: jax.Array, tokens: jax.Array, *, vocab_size: int) -> Logprobs[jax.Array]:
    """Returns those of the given tokens [B] and of the most likely ones, from this shard's logits [B, V / shards]."""
    token_ids = local_token_ids(logits.shape[1])
    logits = jnp.where(token_ids < vocab_size, logits, -jnp.inf)
    highest = jax.lax.pmax(logits.max(axis=1), TENSOR_AXIS)
    total = jax.lax.psum(jnp.exp(logits - highest[:, None]).sum(axis=1), TENSOR_AXIS)
    chosen = jnp.where(token_ids == tokens[:, None], logits, 0.0).sum(axis=1)
    log_total = highest + jnp.log(total)
    top_ids, top = _top(logits, token_ids, min(MAX_LOGPROBS, vocab_size))
    return Logprobs(jax.lax.psum(chosen, TENSOR_AXIS) - log_total, top_ids, top - log_total[:, None])


def _no_logprobs(tokens: jax.Array, vocab_size: int) -> Logprobs[jax.Array]:
    shape = (*tokens.shape, min(MAX_LOGPROBS, vocab_size))
    return Logprobs(jnp.zeros(tokens.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


def _top(logits: jax.Array, token_ids: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Returns ids and values [B, num_top] of each row's largest logits over all shards, lowest id first among equals.

    Exact without sorting the vocabulary: the `num_top` largest lie in the `num_top` chunks with the largest maxima.
    """
    num_rows, num_local = logits.shape
    logits = jnp.where(logits == 0.0, 0.0, logits)  # top_k puts -0.0 below 0.0
    num_chunks = -(-num_local // _CHUNK_TOKENS)
    padding = (0, num_chunks * _CHUNK_TOKENS - num_local)
    chunks = jnp.pad(logits, ((0, 0), padding), constant_values=-jnp.inf).reshape(num_rows, num_chunks, _CHUNK_TOKENS)
    ids = jnp.pad(token_ids, padding).reshape(num_chunks, _CHUNK_TOKENS)
    _, found = jax.lax.top_k(chunks.max(axis=2), min(num_top, num_chunks))
    found = jnp.sort(found, axis=1)  # equals stay in order of their ids
    values = jnp.take_along_axis(chunks, found[:, :, None], axis=1).reshape(num_rows, -1)
    values, index = jax.lax.top_k(values, min(num_top, values.shape[1]))
    local_ids = jnp.take_along_axis(ids[found].reshape(num_rows, -1), index, axis=1)
    values = jax.lax.all_gather(values, TENSOR_AXIS, axis=1, tiled=True)
    local_ids = jax.lax.all_gather(local_ids, TENSOR_AXIS, axis=1, tiled=True)
    values, index = jax.lax.top_k(values, num_top)
    return jnp.take_along_axis(local_ids, index, axis=1), values


def prompt_logprobs(
    structure: nnx.GraphDef, context: MLPContext, params: nnx.State, hidden: jax.Array, targets: jax.Array
) -> Logprobs[jax.Array]:
    """Returns those of `targets` [T], the tokens after the step's, from its hidden states [T, D] in `Forward`.

    Written per shard.
    """
    model = nnx.merge(structure, params)
    hidden = model.after_last_mlp(hidden, context)
    num_tokens = len(targets)
    block = min(num_tokens, _BLOCK_TOKENS)
    padding = (0, -num_tokens % block)
    hidden = jnp.pad(hidden, (padding, (0, 0))).reshape(-1, block, hidden.shape[1])
    blocks = jnp.pad(targets, padding).reshape(-1, block)

    def of_block(block: tuple[jax.Array, jax.Array]) -> Logprobs[jax.Array]:
        return _logprobs(model.logits(block[0]), block[1], vocab_size=model.config.vocab_size)

    found = jax.lax.map(of_block, (hidden, blocks))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], found)


def set_slot_adjustments(
    state: ProcessorState[jax.Array], slot: jax.Array, history: jax.Array, bias: jax.Array
) -> ProcessorState[jax.Array]:
    """Returns the state with that of one slot replaced. Written per shard.

    Args:
      slot: [1] int32, its index.
      history, bias: [V], for the padded vocabulary, the same on every shard.
    """
    num_local = state.history.shape[1]
    first = jax.lax.axis_index(TENSOR_AXIS) * num_local
    parts = [jax.lax.dynamic_slice_in_dim(whole, first, num_local) for whole in (history, bias)]
    return ProcessorState(*(array.at[slot[0]].set(part) for array, part in zip(state, parts, strict=True)))
