"""Chooses the next token from logits that are sharded over the vocabulary.

Step 7 of 10. In: float32 logits of this shard's part of the vocabulary. Out: one token per request, the same on every
shard.

The logits are never gathered. Top-k and top-p find the logit that separates kept from dropped tokens, the threshold, by
a search over the bits of its float, four bits per round, with one small `psum` per round. This is exact for every k and
p, without sorting. Where one GPU holds the whole vocabulary, a kernel searches (`kernels.sampling`). Tokens whose logit
equals the threshold are all kept. Tokens are drawn by the Gumbel-max trick with noise from a counter (request seed,
position, token id), so that a token depends neither on the batch, nor the step, nor the number of shards. Two
neighboring token ids share a counter, whose two random words take as long as one.

The host knows what the requests of a step need, and passes it as one number (`SamplingMode`): the program branches on
it, or is compiled for one mode. Penalties, grammar masks and log-probabilities have programs of their own, see
`logits_processors`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from meshserve.kernels.sampling import FindThreshold
from meshserve.sharding.collectives import Exchange, all_gather
from meshserve.sharding.mesh import TENSOR_AXIS

from ..api.request import NO_TOKEN
from ..api.sampling_params import SamplingMode
from .packing import DTYPES, PARAM_FIELDS

_DIGIT_BITS = 4
_THREEFRY_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_THREEFRY_PARITY = 0x1BD11BDA
_MIN_TEMPERATURE = 1e-30  # practically greedy; dividing logits by less would overflow


class SamplingBatch(NamedTuple):
    """The parameters of each request, each [B]. See `sampling_params.SamplingParams` for their meaning."""

    temperature: jax.Array  # float32; 0 is greedy
    top_p: jax.Array  # float32
    top_k: jax.Array  # int32; 0 is off
    min_p: jax.Array  # float32; 0 is off
    seed_low: jax.Array  # uint32
    seed_high: jax.Array  # uint32
    position: jax.Array  # int32: position of the token to be sampled

    @classmethod
    def unpacked(cls, fields: Mapping[str, jax.Array]) -> Self:
        """Takes the parameters from the packed fields of a step, each [B]."""
        params = {name: fields[name].view(DTYPES[name]) for name in PARAM_FIELDS}
        return cls(**params, position=fields["sample_position"])


def sample(
    logits: jax.Array,
    params: SamplingBatch,
    mode: jax.Array | SamplingMode,
    *,
    vocab_size: int,
    is_unrolled: bool,
    exchange: Exchange = all_gather,
    find_threshold: FindThreshold | None = None,
    token_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns one token per request. Call inside `shard_map`.

    Args:
      logits: [B, V / shards] float32, this shard's part of the padded vocabulary.
      params: the requests' parameters.
      mode: a `SamplingMode` that suffices for every request; tokens do not depend on it. With an int32 array, the
        program contains all modes and chooses on the device.
      vocab_size: the model's; padding beyond it is never chosen.
      is_unrolled: unrolls the rounds of the searches, as for the layers (`model.Qwen3.__call__`).
      exchange: gathers the best token of every shard.
      find_threshold: a kernel that replaces the searches where one shard has the whole vocabulary.
      token_ids: [V / shards] int32, the tokens of the logits if these are of other ones than the whole vocabulary.

    Returns:
      [B] int32 token ids, equal on every shard. Greedy requests take the largest logit, the lowest id among equals.
      Requests with a logit that is NaN or infinite get NO_TOKEN; -inf means that a token is banned.
    """
    named = token_ids
    token_ids = local_token_ids(logits.shape[1]) if named is None else named
    if named is not None or logits.shape[1] * jax.lax.axis_size(TENSOR_AXIS) > vocab_size:
        logits = jnp.where(token_ids < vocab_size, logits, -jnp.inf)

    def greedy() -> tuple[jax.Array, jax.Array]:
        return _largest(_nan_if_infinite(logits, logits), token_ids)

    def random(threshold: Callable[[], jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _random_best(logits, params, token_ids, threshold(), is_named=named is not None)

    thresholds: dict[SamplingMode, Callable[[], jax.Array]] = {
        SamplingMode.RANDOM: lambda: _no_threshold(logits),
        SamplingMode.TOP_P: lambda: _top_p_threshold(logits, params, _no_threshold(logits), is_unrolled=is_unrolled),
        SamplingMode.FILTERED: lambda: _threshold_of_all(logits, params, is_unrolled=is_unrolled),
    }
    if find_threshold is not None and jax.lax.axis_size(TENSOR_AXIS) == 1:
        by_kernel = partial(_threshold_by_kernel, find_threshold, logits, params)
        thresholds |= {SamplingMode.TOP_P: by_kernel, SamplingMode.FILTERED: by_kernel}
        if not isinstance(mode, SamplingMode):
            # Before the branch, so that no branch contains a kernel. It returns at once for requests without filters.
            found = by_kernel()
            thresholds = {SamplingMode.RANDOM: lambda: found}
    if mode is SamplingMode.GREEDY:
        score, token_id = greedy()
    elif isinstance(mode, SamplingMode):
        score, token_id = random(thresholds[mode])
    else:  # the modes differ in their thresholds, so that the noise is compiled once
        found_for_mode = partial(jax.lax.switch, mode - SamplingMode.RANDOM, list(thresholds.values()))
        score, token_id = jax.lax.cond(mode == SamplingMode.GREEDY, greedy, partial(random, found_for_mode))
    token_id = jnp.where(jnp.isnan(score), NO_TOKEN, token_id)
    return _best_of_shards(score, token_id, exchange)


def processed_logits(logits: jax.Array, params: SamplingBatch, *, vocab_size: int) -> jax.Array:
    """Returns the logits [B, V / shards] of the distribution that `sample` draws from; -inf where it draws nothing.

    They are divided by the temperature, and filtered. Those of greedy requests stay as they are. The search is not
    unrolled: it runs for requests that ask for log-probabilities only.
    """
    in_vocabulary = jnp.where(local_token_ids(logits.shape[1]) < vocab_size, logits, -jnp.inf)
    least = _threshold_of_all(in_vocabulary, params, is_unrolled=False)
    scaled = logits / _temperature(params)[:, None]
    drawn = jnp.where(_sortable(in_vocabulary) >= least[:, None], scaled, -jnp.inf)
    return jnp.where((params.temperature > 0.0)[:, None], drawn, logits)


def local_token_ids(num_local: int) -> jax.Array:
    """Returns the token ids of this shard's part of the vocabulary."""
    return jax.lax.axis_index(TENSOR_AXIS) * num_local + jnp.arange(num_local, dtype=jnp.int32)


def _temperature(params: SamplingBatch) -> jax.Array:
    """Returns the divisors of the logits, [B]; those of greedy requests are not used."""
    return jnp.where(params.temperature > 0.0, jnp.maximum(params.temperature, _MIN_TEMPERATURE), 1.0)


def _random_best(
    logits: jax.Array, params: SamplingBatch, token_ids: jax.Array, least: jax.Array, *, is_named: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest score of each row [B], and its token id [B].

    A score is the logit of a greedy request, else the scaled logit plus noise, or -inf below the threshold `least`.
    With `is_named`, token ids are in any order.
    """
    if is_named or logits.shape[1] % 2:  # pairs may lie apart, or on two shards
        noise = jnp.where(token_ids % 2 == 0, *_gumbel_pairs(params, token_ids // 2))
        return _largest(_random_scores(logits, noise, params, least), token_ids)
    pairs = token_ids[::2] // 2

    def scores_of_pairs(even: jax.Array, odd: jax.Array, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        even_noise, odd_noise = _gumbel_pairs(params, pairs)
        return _random_scores(even, even_noise, params, least), _random_scores(odd, odd_noise, params, least)

    # The reduction takes one number for each pair, and which of the two it was is computed again for the best pair: XLA
    # would write numbers that are used twice to memory.
    score, pair = _largest(jnp.maximum(*scores_of_pairs(logits[:, ::2], logits[:, 1::2], pairs)), pairs)
    place = 2 * (pair - pairs[0])[:, None]
    even, odd = (jnp.take_along_axis(logits, place + index, axis=1) for index in range(2))
    even, odd = scores_of_pairs(even, odd, pair[:, None])
    return score, 2 * pair + (odd > even)[:, 0]


def _random_scores(logits: jax.Array, noise: jax.Array, params: SamplingBatch, least: jax.Array) -> jax.Array:
    """Returns the scores [B, N] of logits [B, N]; see `_random_best`. Those of NaN and infinite logits are NaN."""
    scaled = logits / _temperature(params)[:, None]
    drawn = jnp.where(_sortable(logits) >= least[:, None], scaled + noise, -jnp.inf)
    return _nan_if_infinite(jnp.where((params.temperature > 0.0)[:, None], drawn, logits), logits)


def _nan_if_infinite(scores: jax.Array, logits: jax.Array) -> jax.Array:
    """Makes the scores of NaN and infinite logits NaN, which `_largest` finds first."""
    return jnp.where(logits < jnp.inf, scores, jnp.nan)


def _largest(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns each row's largest score [B], NaN before all others, and its id [B], the lowest among equals.

    `ids` is [N] or [B, N]. One reduction finds both, so that XLA does not compute the chosen score again.
    """

    def larger(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
        is_one = (one[0] > other[0]) | jnp.isnan(one[0])
        is_one |= (one[0] == other[0]) & (one[1] < other[1])
        return [jnp.where(is_one, x, y) for x, y in zip(one, other, strict=True)]

    operands = [scores, jnp.broadcast_to(ids, scores.shape)]
    none = [jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)]
    score, token_id = jax.lax.reduce(operands, none, larger, dimensions=(1,))
    return score, token_id


def _no_threshold(logits: jax.Array) -> jax.Array:
    return jnp.zeros(logits.shape[0], jnp.uint32)


def _threshold_by_kernel(find_threshold: FindThreshold, logits: jax.Array, params: SamplingBatch) -> jax.Array:
    """Applies all filters by the kernel."""
    return find_threshold(
        logits, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )


def _threshold_of_all(logits: jax.Array, params: SamplingBatch, *, is_unrolled: bool) -> jax.Array:
    """Applies min-p, then top-k, then top-p to the remaining tokens."""
    threshold = _min_p_threshold(logits, params)
    threshold = _top_k_threshold(logits, params, threshold, is_unrolled=is_unrolled)
    return _top_p_threshold(logits, params, threshold, is_unrolled=is_unrolled)


def _min_p_threshold(logits: jax.Array, params: SamplingBatch) -> jax.Array:
    """Keeps the tokens that are at least `min_p` times as likely as the most likely one."""
    return _sortable(_highest(logits) + _temperature(params) * jnp.log(params.min_p))


def _top_k_threshold(logits: jax.Array, params: SamplingBatch, least: jax.Array, *, is_unrolled: bool) -> jax.Array:
    """Keeps the k largest of the tokens with keys of at least `least`, or all if there are fewer. 0 is off."""
    keys = _sortable(logits)
    is_counted = jnp.isfinite(logits) & (keys >= least[:, None])
    weights = is_counted.astype(jnp.float32)  # counts below 2^24 are exact
    threshold = _threshold(keys, weights, params.top_k.astype(jnp.float32), is_unrolled=is_unrolled)
    return jnp.where(params.top_k > 0, jnp.maximum(threshold, least), least)


def _top_p_threshold(logits: jax.Array, params: SamplingBatch, least: jax.Array, *, is_unrolled: bool) -> jax.Array:
    """Keeps the smallest set of most likely tokens, of those from `least` on, whose probability reaches p. 1 is off."""
    keys = _sortable(logits)
    weights = jnp.exp((logits - _highest(logits)[:, None]) / _temperature(params)[:, None])
    weights = jnp.where(keys >= least[:, None], weights, 0.0)
    target = params.top_p * jax.lax.psum(weights.sum(axis=1), TENSOR_AXIS)
    target = jnp.maximum(target, jnp.finfo(jnp.float32).tiny)  # a p that underflows still keeps the most likely
    threshold = _threshold(keys, weights, target, is_unrolled=is_unrolled)
    return jnp.where(params.top_p < 1.0, jnp.maximum(threshold, least), least)


def _highest(logits: jax.Array) -> jax.Array:
    return jax.lax.pmax(logits.max(axis=1), TENSOR_AXIS)


def _sortable(x: jax.Array) -> jax.Array:
    """Maps float32 to uint32 keys of the same order; -0.0 equals 0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _threshold(keys: jax.Array, weights: jax.Array, target: jax.Array, *, is_unrolled: bool) -> jax.Array:
    """Returns each row's largest key t such that the weights of all keys >= t, over all shards, reach the target.

    keys, weights [B, V / shards]; target [B] -> [B] uint32. 0 if rounding keeps the whole sum below the target.
    """
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)
    sums = _sums_in_one_pass if is_unrolled else _sums

    def fix_digit(index: jax.Array, prefix: jax.Array) -> jax.Array:
        shift = jnp.uint32(32 - _DIGIT_BITS) - jnp.uint32(_DIGIT_BITS) * index.astype(jnp.uint32)
        candidates = prefix[:, None] | (digits << shift)  # [B, 15], ascending
        # Sums decrease along the candidates, so the number that reach the target is the digit.
        reached = jax.lax.psum(sums(keys, weights, candidates), TENSOR_AXIS)
        digit = (reached >= target).sum(axis=0, dtype=jnp.uint32)
        return prefix | (digit << shift)

    start = jnp.zeros(keys.shape[0], jnp.uint32)
    return jax.lax.fori_loop(0, 32 // _DIGIT_BITS, fix_digit, start, unroll=is_unrolled)


def _sums(keys: jax.Array, weights: jax.Array, candidates: jax.Array) -> jax.Array:
    """Sums the weights of each row's keys >= each of its candidates. [B, V], [B, V], [B, C] -> [C, B]."""
    is_above = keys[:, None, :] >= candidates[:, :, None]
    return jnp.where(is_above, weights[:, None, :], 0.0).sum(axis=2).T


def _sums_in_one_pass(keys: jax.Array, weights: jax.Array, candidates: jax.Array) -> jax.Array:
    """Computes `_sums` as one reduction of many values, which XLA compiles for GPUs to one pass over the row, not C."""
    columns = jnp.split(candidates, candidates.shape[1], axis=1)
    above = [jnp.where(keys >= column, weights, 0.0) for column in columns]
    sums = jax.lax.reduce(above, [jnp.float32(0.0)] * len(above), partial(jax.tree.map, jax.lax.add), dimensions=(1,))
    return jnp.stack(sums)


def _gumbel_pairs(params: SamplingBatch, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns standard Gumbel noise of the tokens 2 i and 2 i + 1 for each i of `pairs` [N] or [B, N], each [B, N].

    It is a function of (seed, position, token id) alone.
    """
    shape = (params.position.shape[0], pairs.shape[-1])
    position = jnp.broadcast_to(params.position.astype(jnp.uint32)[:, None], shape)
    pair = jnp.broadcast_to(pairs.astype(jnp.uint32), shape)
    even, odd = threefry(params.seed_low[:, None], params.seed_high[:, None], position, pair)
    return _gumbel(even), _gumbel(odd)


def _gumbel(bits: jax.Array) -> jax.Array:
    """Turns random uint32 words into standard Gumbel noise."""
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))  # log1p keeps the resolution where the noise is large


def threefry(key_low: jax.Array, key_high: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two words of Threefry-2x32 with 20 rounds (Salmon et al., 2011), elementwise over uint32 arrays.

    It is written out so that XLA fuses it with its use; on GPUs, jax's own primitive would be a separate kernel.
    """
    keys = (key_low, key_high, key_low ^ key_high ^ jnp.uint32(_THREEFRY_PARITY))
    x, y = low + keys[0], high + keys[1]
    for group in range(5):
        for rotation in _THREEFRY_ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _best_of_shards(score: jax.Array, token_id: jax.Array, exchange: Exchange) -> jax.Array:
    """Returns the token of each row's largest score [B] over all shards, the lowest id among equals."""
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return token_id
    packed = jnp.stack([jax.lax.bitcast_convert_type(score, jnp.int32), token_id], axis=1)
    shards = exchange(packed)  # [shards, B, 2]: one small collective
    scores = jax.lax.bitcast_convert_type(shards[:, :, 0], jnp.float32)
    winner = jnp.argmax(scores, axis=0)  # the first among equals: shards stand in order of token id
    return jnp.take_along_axis(shards[:, :, 1], winner[None, :], axis=0)[0]
