"""Sampling over vocabulary shards: the kept set, the frequencies and the noise, against plain numpy in float64."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec

from meshserve.runtime.api.request import NO_TOKEN
from meshserve.runtime.api.sampling_params import SamplingMode, SamplingParams
from meshserve.runtime.program import sampling
from meshserve.runtime.program.sampling import SamplingBatch
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

TP_SIZES = (1, 4, 8)
NUM_ROWS, VOCAB_SIZE = 4096, 61  # the vocabulary is a multiple of no TP size: there is padding at TP 4 and 8
CHEATING_LOGIT = 1e9  # logit of the padding, chosen at once by a sampler that reads it


def over_shards(tp: int, function, num_row_arguments: int):
    """function(logits [B, V / tp], *row arguments) inside shard_map, as a program on whole arrays."""
    vocab = PartitionSpec(None, TENSOR_AXIS)
    is_vocab_out = function.func is not sampling.sample
    return jax.jit(
        jax.shard_map(
            function,
            mesh=make_mesh(tp),
            in_specs=(vocab, *[PartitionSpec()] * num_row_arguments),
            out_specs=vocab if is_vocab_out else PartitionSpec(),
            check_vma=False,
        )
    )


@functools.cache
def sampler(tp: int, is_unrolled: bool = False):
    function = functools.partial(sampling.sample, vocab_size=VOCAB_SIZE, is_unrolled=is_unrolled)
    return over_shards(tp, function, 2)


def sample(logits: np.ndarray, params: SamplingBatch, tp: int, is_unrolled: bool = False) -> np.ndarray:
    """Tokens of logits [NUM_ROWS, VOCAB_SIZE]."""
    padding = (0, -(-VOCAB_SIZE // tp) * tp - VOCAB_SIZE)
    padded = np.pad(logits, ((0, 0), padding), constant_values=CHEATING_LOGIT)
    return np.asarray(sampler(tp, is_unrolled)(padded.astype(np.float32), params, mode_of(params)))


def mode_of(params: SamplingBatch) -> np.int32:
    """As the host finds it: the largest of the rows'."""
    rows = zip(params.temperature, params.top_p, params.top_k, params.min_p, strict=True)
    settings = {tuple(map(float, row)) for row in rows}
    modes = [
        SamplingParams(temperature=min(t, 100.0), top_p=max(p, 1e-9), top_k=int(k), min_p=m).mode
        for t, p, k, m in settings
    ]
    return np.int32(max(modes))


def make_params(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, position=0) -> SamplingBatch:
    """Each argument is one value for all rows, or one a row."""

    def rows(value, dtype) -> np.ndarray:
        return np.broadcast_to(np.asarray(value), (NUM_ROWS,)).astype(dtype)

    seed = rows(seed, np.uint64)
    return SamplingBatch(
        temperature=rows(temperature, np.float32),
        top_p=rows(top_p, np.float32),
        top_k=rows(top_k, np.int32),
        min_p=rows(min_p, np.float32),
        seed_low=(seed & 0xFFFFFFFF).astype(np.uint32),
        seed_high=(seed >> 32).astype(np.uint32),
        position=rows(position, np.int32),
    )


def top_k_set(logits: np.ndarray, k: int) -> np.ndarray:
    """Which of one row's logits top-k keeps: the k largest and what equals the last of them."""
    if k == 0 or k >= len(logits):
        return np.isfinite(logits)
    return logits >= np.sort(logits)[-k]


def top_p_set(logits: np.ndarray, p: float) -> np.ndarray:
    """Which of one row's logits top-p keeps: equals stay together, the largest values until their sum reaches p."""
    if p >= 1.0:
        return np.isfinite(logits)
    values, _, counts = np.unique(logits[np.isfinite(logits)], return_index=True, return_counts=True)
    values, counts = values[::-1].astype(np.float64), counts[::-1]
    mass = np.cumsum(np.exp(values - values[0]) * counts)
    return logits >= values[np.argmax(mass >= p * mass[-1])]


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities of one row's tokens in float64: temperature, then top-k, then top-p of what is left."""
    scaled = logits.astype(np.float64) / temperature
    scaled = np.where(top_k_set(scaled, top_k), scaled, -np.inf)
    scaled = np.where(top_p_set(scaled, top_p), scaled, -np.inf)
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


# --- modes


@pytest.mark.parametrize("mode", SamplingMode)
def test_a_sampler_of_one_mode_gives_the_tokens_of_the_switch(mode: SamplingMode):
    params = {
        SamplingMode.GREEDY: make_params(temperature=0.0),
        SamplingMode.RANDOM: make_params(seed=np.arange(NUM_ROWS)),
        SamplingMode.TOP_P: make_params(seed=np.arange(NUM_ROWS), top_p=0.7),
        SamplingMode.FILTERED: make_params(seed=np.arange(NUM_ROWS), top_p=0.9, top_k=7, min_p=0.05),
    }[mode]
    assert mode_of(params) == mode
    logits = np.random.default_rng(8).normal(size=(NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    function = functools.partial(sampling.sample, mode=mode, vocab_size=VOCAB_SIZE, is_unrolled=False)
    alone = over_shards(1, function, 1)(logits, params)
    np.testing.assert_array_equal(alone, sample(logits, params, 1))


# --- logits that are not finite

MODES = {
    SamplingMode.GREEDY: {"temperature": 0.0}, SamplingMode.RANDOM: {}, SamplingMode.TOP_P: {"top_p": 0.7},
    SamplingMode.FILTERED: {"top_p": 0.9, "top_k": 7, "min_p": 0.05},
}  # fmt: skip


def spoiled_rows(logits: np.ndarray) -> dict[int, np.ndarray]:
    """Rows with one or more logits that are not finite, by index."""
    negative_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]  # what x86 makes of inf - inf
    rows: dict[int, np.ndarray] = {}
    for value in (np.nan, negative_nan, np.inf):
        for places in ([0], [VOCAB_SIZE - 1], [17, 40], range(VOCAB_SIZE)):
            index = 1 + 5 * len(rows)
            rows[index] = logits[index].copy()
            rows[index][list(places)] = value
    rows[1][3:] = -np.inf  # banned, which is no error by itself
    return rows


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_rows_with_logits_that_are_not_finite_get_no_token(tp: int, mode: SamplingMode):
    params = make_params(**MODES[mode], seed=np.arange(NUM_ROWS))
    logits = np.random.default_rng(8).normal(size=(NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    expected = sample(logits, params, tp).copy()
    for index, row in spoiled_rows(logits).items():
        logits[index], expected[index] = row, NO_TOKEN
    np.testing.assert_array_equal(sample(logits, params, tp), expected)


@pytest.mark.parametrize("threshold", [0, 2**32 - 1])
def test_no_threshold_hides_logits_that_are_not_finite(threshold: int):
    """A kernel may find any threshold for such a row."""

    def find_threshold(logits: jax.Array, **params: jax.Array) -> jax.Array:
        return jnp.full(logits.shape[:1], threshold, jnp.uint32)

    function = functools.partial(
        sampling.sample, mode=SamplingMode.FILTERED, vocab_size=VOCAB_SIZE, is_unrolled=False,
        find_threshold=find_threshold,
    )  # fmt: skip
    logits = np.random.default_rng(8).normal(size=(NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    for index, row in (spoiled := spoiled_rows(logits)).items():
        logits[index] = row
    tokens = np.asarray(over_shards(1, function, 1)(logits, make_params(seed=np.arange(NUM_ROWS), top_k=3)))
    np.testing.assert_array_equal(np.flatnonzero(tokens == NO_TOKEN), sorted(spoiled))


# --- greedy


@pytest.mark.parametrize("tp", TP_SIZES)
def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(tp: int):
    rng = np.random.default_rng(tp)
    logits = rng.integers(-3, 4, (NUM_ROWS, VOCAB_SIZE)).astype(np.float32)  # full of ties
    logits[0] = 0.0  # all equal
    logits[1, -1] = 5.0  # the last token before the padding
    logits[2] = -3e38
    expected = np.argmax(logits, axis=1)
    np.testing.assert_array_equal(sample(logits, make_params(temperature=0.0), tp), expected)
    # The same rows beside one that draws, which takes the other branch of the program.
    temperature = np.zeros(NUM_ROWS)
    temperature[-1] = 1.0
    mixed = sample(logits, make_params(temperature, top_p=0.5, top_k=3), tp)
    np.testing.assert_array_equal(mixed[:-1], expected[:-1])


# --- what is kept


def awkward_logits(num_columns: int) -> np.ndarray:
    """Rows of every kind: spread, flat, full of ties, huge, tiny, dominated, and with tokens that are out already."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((8, num_columns)).astype(np.float32)
    masked = np.where(rng.random((8, num_columns)) < 0.7, -np.inf, normal)
    masked[:, 3] = 1.0  # one at least is in
    rows = [
        normal, 10 * normal, np.round(normal), np.round(normal) * 0 - 7, 1e30 * normal, 1e-30 * normal, 1e-3 * normal,
        np.where(np.arange(num_columns) == 5, 80, normal), masked, np.round(masked), -np.abs(normal), normal + 1e4,
    ]  # fmt: skip
    return np.concatenate(rows).astype(np.float32)


def keeper(tp: int, name: str) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """Logits and values of a parameter, a row each -> the same logits, what the filter drops at -inf. By the
    searches of a loop, and by those that are written out, which must agree."""
    find = {"top_k": sampling._top_k_threshold, "top_p": sampling._top_p_threshold}[name]

    def kept(logits: jax.Array, values: jax.Array, *, is_unrolled: bool) -> jax.Array:
        params = SamplingBatch(*[jnp.ones(len(logits))] * 7)._replace(**{name: values})
        least = find(logits, params, sampling._no_threshold(logits), is_unrolled=is_unrolled)
        return jnp.where(sampling._sortable(logits) >= least[:, None], logits, -jnp.inf)

    looped, unrolled = (over_shards(tp, functools.partial(kept, is_unrolled=way), 1) for way in (False, True))

    def both(logits: np.ndarray, values: np.ndarray) -> jax.Array:
        found = looped(logits, values)
        if name == "top_k":  # else the sums' order, and with it their rounding, may differ
            np.testing.assert_array_equal(unrolled(logits, values), found)
        return found

    return both


@pytest.mark.parametrize("tp", TP_SIZES)
def test_top_k_keeps_exactly_the_k_largest(tp: int):
    logits = awkward_logits(64)
    keep = keeper(tp, "top_k")
    for k in (0, 1, 2, 5, 20, 63, 64, 65, 2**31 - 1):
        kept = np.asarray(keep(logits, np.full(len(logits), k, np.int32)))
        for row, out in zip(logits, kept, strict=True):
            expected = np.where(top_k_set(row, min(k, np.isfinite(row).sum())), row, -np.inf)
            np.testing.assert_array_equal(out, expected, err_msg=f"k {k}")


def p_between_two_sums(row: np.ndarray, u: float) -> float:
    """A p that is far from every sum at which the kept set changes, so that rounding cannot decide."""
    values, counts = np.unique(row[np.isfinite(row)].astype(np.float64), return_counts=True)
    mass = np.cumsum((np.exp(values - values[-1]) * counts)[::-1])
    sums = np.concatenate([[0.0], mass / mass[-1]])
    wide = np.flatnonzero(np.diff(sums) > 1e-4)
    chosen = wide[int(u * len(wide))]
    return float((sums[chosen] + sums[chosen + 1]) / 2)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_top_p_keeps_exactly_the_smallest_set_that_reaches_p(tp: int):
    logits = awkward_logits(64)
    keep = keeper(tp, "top_p")
    rng = np.random.default_rng(1)
    for _ in range(8):
        top_p = [p_between_two_sums(row, u) for row, u in zip(logits, rng.random(len(logits)), strict=True)]
        kept = np.asarray(keep(logits, np.array(top_p, np.float32)))
        for row, p, out in zip(logits, top_p, kept, strict=True):
            np.testing.assert_array_equal(out, np.where(top_p_set(row, p), row, -np.inf), err_msg=f"p {p}")
    everything = np.asarray(keep(logits, np.ones(len(logits), np.float32)))
    np.testing.assert_array_equal(everything, logits)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("p", [0.0, 1e-45, 1e-30, 1e-7])
def test_a_tiny_p_keeps_the_most_likely_alone(tp: int, p: float):
    """0 is what a double such as 1e-60 becomes in float32."""
    logits = awkward_logits(64)
    keep = keeper(tp, "top_p")
    kept = np.asarray(keep(logits, np.full(len(logits), p, np.float32)))
    np.testing.assert_array_equal(kept, np.where(logits == logits.max(axis=1, keepdims=True), logits, -np.inf))


@pytest.mark.parametrize("tp", TP_SIZES)
def test_a_p_near_1_errs_by_no_more_than_rounding(tp: int):
    """What is dropped is less likely than all that is kept, and weighs 1 - p, give or take float32."""
    logits = awkward_logits(64)
    keep = keeper(tp, "top_p")
    for p in (0.999, 1 - 1e-5, 1 - 2.0**-24):
        kept = np.isfinite(np.asarray(keep(logits, np.full(len(logits), p, np.float32))))
        for row, is_kept in zip(logits, kept, strict=True):
            weights = np.exp(row.astype(np.float64) - row.max())
            weights /= weights.sum()
            assert weights[is_kept].sum() >= p - 1e-6
            smallest_kept = row == row[is_kept].min()
            assert weights[is_kept & ~smallest_kept].sum() < p + 1e-6
            assert (row[~is_kept] < row[is_kept].min()).all()


# --- what is drawn

SETTINGS = [
    # temperature, top_k, top_p
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (3.0, 0, 1.0),
    (1.0, 5, 1.0),
    (1.0, 0, 0.8),
    (2.0, 12, 0.77),
    (0.5, 2**31 - 1, 0.95),
    (1.0, 1, 1.0),
]


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_tokens_come_with_their_exact_probability(
    tp: int, temperature: float, top_k: int, top_p: float, num_draws: int
):
    """Positions of one request, then position 7 of many requests."""
    row = np.random.default_rng(3).standard_normal(VOCAB_SIZE).astype(np.float32) * 1.5
    expected = probabilities(row, temperature, top_k, top_p)
    logits = np.broadcast_to(row, (NUM_ROWS, VOCAB_SIZE))
    for varies in ("position", "seed"):
        counts = np.zeros(VOCAB_SIZE)
        for call in range(max(1, num_draws // 2 // NUM_ROWS)):
            where = {"seed": 12345, "position": 7, varies: np.arange(NUM_ROWS) + NUM_ROWS * call}
            tokens = sample(logits, make_params(temperature, top_p, top_k, **where), tp)
            counts += np.bincount(tokens, minlength=VOCAB_SIZE)
        num_drawn = counts.sum()
        assert counts[expected == 0].sum() == 0, "a dropped token was drawn"
        likely = expected * num_drawn >= 5  # chi-squared needs some of each; the rest is one class
        observed = [*counts[likely], counts[~likely].sum()]
        wanted = np.array([*expected[likely], expected[~likely].sum()]) * num_drawn
        observed, wanted = np.array(observed)[wanted > 0], wanted[wanted > 0]
        if len(wanted) > 1:
            assert scipy.stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-3
        else:
            assert observed == num_drawn


def test_neighbouring_positions_and_seeds_are_independent():
    logits = np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32)
    by_position = sample(logits, make_params(seed=99, position=np.arange(NUM_ROWS)), 4)
    by_seed = sample(logits, make_params(seed=np.arange(NUM_ROWS) + 2**40, position=11), 4)
    for tokens in (by_position, by_seed):
        table = np.zeros((4, 4))
        np.add.at(table, (tokens[:-1] % 4, tokens[1:] % 4), 1)
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-3
    assert np.mean(by_position == by_seed) < 0.05


# --- what a token depends on


def varied_rows() -> tuple[np.ndarray, SamplingBatch]:
    """Greedy and random rows of all settings, mixed."""
    rng = np.random.default_rng(5)
    logits = 2 * rng.standard_normal((NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    params = make_params(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.3], NUM_ROWS),
        top_p=rng.choice([0.3, 0.9, 1.0], NUM_ROWS),
        top_k=rng.choice([0, 1, 10, 1000], NUM_ROWS),
        seed=rng.integers(0, 2**63, NUM_ROWS),
        position=rng.integers(0, 40_000, NUM_ROWS),
    )
    return logits, params


def test_the_same_token_on_any_number_of_shards():
    logits, params = varied_rows()
    alone = sample(logits, params, 1)
    for tp in (4, 8):
        np.testing.assert_array_equal(sample(logits, params, tp), alone)
    np.testing.assert_array_equal(sample(logits, params, 4, is_unrolled=True), alone)


def test_greedy_rows_among_random_ones_and_the_other_way_round():
    logits, params = varied_rows()
    tokens = sample(logits, params, 4)
    is_greedy = params.temperature == 0.0
    assert 0.2 < is_greedy.mean() < 0.3
    np.testing.assert_array_equal(tokens[is_greedy], np.argmax(logits[is_greedy], axis=1))
    assert np.mean(tokens[~is_greedy] == np.argmax(logits[~is_greedy], axis=1)) < 0.9
    for token, row, temperature, top_k, top_p in zip(
        tokens, logits, params.temperature, params.top_k, params.top_p, strict=True
    ):
        if temperature > 0:
            assert probabilities(row, temperature, int(top_k), float(top_p))[token] > 0


def test_a_token_does_not_depend_on_its_company():
    """Nor on its place: the rows in another order, and with half of them made greedy or replaced."""
    logits, params = varied_rows()
    tokens = sample(logits, params, 4)
    order = np.random.default_rng(6).permutation(NUM_ROWS)
    shuffled = SamplingBatch(*(field[order] for field in params))
    np.testing.assert_array_equal(sample(logits[order], shuffled, 4), tokens[order])
    half = NUM_ROWS // 2
    others = params._replace(temperature=np.where(np.arange(NUM_ROWS) < half, params.temperature, np.float32(0.0)))
    other_logits = np.concatenate([logits[:half], -logits[half:]])
    np.testing.assert_array_equal(sample(other_logits, others, 4)[:half], tokens[:half])


@pytest.mark.parametrize("field", ["seed_low", "seed_high", "position"])
def test_a_token_depends_on_every_word_of_its_counter(field: str):
    logits = np.zeros((NUM_ROWS, VOCAB_SIZE), np.float32)
    params = make_params(seed=2**40 + 1, position=3)
    word = getattr(params, field)
    changed = params._replace(**{field: word + np.arange(NUM_ROWS, dtype=word.dtype)})
    counts = np.bincount(sample(logits, changed, 4), minlength=VOCAB_SIZE)
    assert len(set(sample(logits, params, 4))) == 1
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 2e-38, 1e-30, 1e-6])
def test_the_lowest_temperatures_are_greedy(temperature: float):
    logits = 20 * np.random.default_rng(7).standard_normal((NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    params = make_params(temperature, top_p=0.9, top_k=20, seed=np.arange(NUM_ROWS))
    is_clear = np.diff(np.sort(logits, axis=1)[:, -2:])[:, 0] > 1e-3
    tokens = sample(logits, params, 4)
    np.testing.assert_array_equal(tokens[is_clear], np.argmax(logits, axis=1)[is_clear])


def test_threefry_is_that_of_jax():
    rng = np.random.default_rng(8)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    counter = rng.integers(0, 2**32, (2, 1000), dtype=np.uint32)
    ours = sampling.threefry(jnp.uint32(key[0]), jnp.uint32(key[1]), jnp.asarray(counter[0]), jnp.asarray(counter[1]))
    theirs = threefry_2x32(jnp.asarray(key), jnp.asarray(counter.reshape(-1)))
    np.testing.assert_array_equal(np.concatenate(ours), theirs)
