"""Penalties, bias, bans, masks and log-probabilities over vocabulary shards, against plain numpy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import PartitionSpec

from meshserve.runtime.api.request import NO_TOKEN
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.program.processors import logits_processors
from meshserve.runtime.program.processors.contract import COUNT, ENDS, IN_PROMPT, ProcessorState
from meshserve.runtime.program.processors.processor_batch import (
    ADJUSTS,
    REPORTS_PROCESSED,
    SAMPLES,
    ProcessorShape,
    next_size,
    processor_sizes,
)
from meshserve.runtime.program.sampling import sample
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

TP_SIZES = (1, 4, 8)
NUM_ROWS, VOCAB_SIZE = 4096, 61  # is a multiple of no TP size: there is padding at TP 4 and 8
STATE_ROWS, STATE_ROW = 3, 1  # the row that cases use
SHAPE = ProcessorShape(NUM_ROWS)
NO_ROW = STATE_ROWS
CHEATING_LOGIT = 1e9  # logit of the padding
VOCAB = PartitionSpec(None, TENSOR_AXIS)
ANY = PartitionSpec()


@functools.cache
def program(tp: int, vocab_size: int = VOCAB_SIZE, shape: ProcessorShape = SHAPE):
    state = ProcessorState(VOCAB, VOCAB)
    choose = functools.partial(sample, vocab_size=vocab_size, is_unrolled=False)
    function = functools.partial(logits_processors.sample_processed, shape=shape, vocab_size=vocab_size, choose=choose)
    return jax.jit(
        jax.shard_map(
            function,
            mesh=make_mesh(tp),
            in_specs=(state, ANY, VOCAB, ANY, ANY),
            out_specs=(state, ANY, ANY),
            check_vma=False,
        )
    )


@dataclasses.dataclass(kw_only=True)
class Case:
    """One row of logits and everything that changes how it is sampled from."""

    logits: np.ndarray  # [V]
    counts: np.ndarray  # [V] in the output
    prompt: np.ndarray  # [V] bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: np.ndarray | None = None
    ends: tuple[int, ...] = ()
    must_go_on: bool = False
    mask: np.ndarray | None = None  # [V] bool
    has_logprobs: bool = False
    reports_processed: bool = False

    def probabilities(self) -> np.ndarray:
        """In float64, word for word as the contract has it."""
        logits = self.logits.astype(np.float64) + (0 if self.bias is None else self.bias)
        if self.must_go_on:
            logits[list(self.ends)] = -np.inf
        seen = self.prompt | (self.counts > 0)
        logits = np.where(seen, np.where(logits > 0, logits / self.repetition, logits * self.repetition), logits)
        logits = logits - self.frequency * self.counts - self.presence * (self.counts > 0)
        if self.mask is not None:
            logits[~self.mask] = -np.inf
        if self.temperature == 0.0:
            return np.eye(len(logits))[np.argmax(logits)]
        weights = np.exp((logits - logits.max()) / self.temperature)
        weights[weights < self.min_p] = 0.0
        order = np.argsort(-weights, kind="stable")
        if self.top_k:
            weights[order[self.top_k :]] = 0.0
        if self.top_p < 1.0:
            mass = np.cumsum(weights[order]) / weights.sum()
            weights[order[np.argmax(mass >= self.top_p) + 1 :]] = 0.0
        return weights / weights.sum()

    def packed(self, shape: ProcessorShape, seeds: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        packed = np.zeros(shape.size, np.int32)
        flags = SAMPLES | ADJUSTS | (REPORTS_PROCESSED if self.reports_processed else 0)
        seed = seeds.astype(np.uint64)
        floats = {
            "temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p,
            "repetition_penalty": self.repetition, "frequency_penalty": self.frequency,
            "presence_penalty": self.presence,
        }  # fmt: skip
        values = {name: np.full(len(rows), value, np.float32).view(np.int32) for name, value in floats.items()}
        values |= {
            "slots": rows, "flags": np.full(len(rows), flags), "sample_position": positions,
            "first_end": positions + self.must_go_on,
            "top_k": np.full(len(rows), self.top_k), "seed_low": (seed & 0xFFFFFFFF).astype(np.uint32).view(np.int32),
            "seed_high": (seed >> np.uint64(32)).astype(np.uint32).view(np.int32),
        }  # fmt: skip
        is_random = self.temperature > 0
        mode = SamplingMode.FILTERED if is_random else SamplingMode.GREEDY
        values |= {"mode": [mode], "has_logprobs": [self.has_logprobs]}
        for name, value in values.items():
            packed[shape.fields[name]][: len(value)] = value
        return packed

    def run(self, tp: int, seeds, positions, num_rows: int = NUM_ROWS) -> tuple[ProcessorState, np.ndarray, object]:
        """Draws for requests that all have this case's row of the state."""
        shape = ProcessorShape(num_rows)
        state, logits, masks = self.operands(tp, num_rows)
        seeds, positions = (np.broadcast_to(array, (num_rows,)) for array in (seeds, positions))
        packed = self.packed(shape, seeds, positions, np.full(num_rows, STATE_ROW))
        state, last_tokens, sampled = program(tp, shape=shape)(
            state, np.zeros(STATE_ROWS, np.int32), logits, packed, masks
        )
        return state, np.asarray(last_tokens), sampled

    def operands(self, tp: int, num_rows: int) -> tuple[ProcessorState, np.ndarray, np.ndarray]:
        """Returns the state, the logits and the masks of rows that all have this case's."""
        num_local = -(-VOCAB_SIZE // tp)
        padding = num_local * tp - VOCAB_SIZE
        history, bias = np.zeros((STATE_ROWS, VOCAB_SIZE), np.int32), np.zeros((STATE_ROWS, VOCAB_SIZE), np.float32)
        history[STATE_ROW] = self.counts + IN_PROMPT * self.prompt
        history[STATE_ROW, list(self.ends)] += ENDS
        bias[STATE_ROW] = 0 if self.bias is None else self.bias
        state = ProcessorState(*(np.pad(array, ((0, 0), (0, padding))) for array in (history, bias)))
        logits = np.pad(self.logits, (0, padding), constant_values=CHEATING_LOGIT).astype(np.float32)
        logits = np.broadcast_to(logits, (num_rows, len(logits)))
        masks = np.full((num_rows, -(-VOCAB_SIZE // 32)), 2**32 - 1, np.uint32)
        if self.mask is not None:
            masks[:] = words(self.mask)
        return state, logits, masks


def words(mask: np.ndarray) -> np.ndarray:
    """[..., V] bool -> [..., ceil(V / 32)] uint32, token t in bit t % 32 of word t // 32."""
    padded = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    bits = padded.reshape(*mask.shape[:-1], -1, 32).astype(np.uint32)
    return (bits << np.arange(32, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)


def new_case(**changes) -> Case:
    rng = np.random.default_rng(3)
    case = Case(
        logits=(1.5 * rng.standard_normal(VOCAB_SIZE)).astype(np.float32),
        counts=np.where(rng.random(VOCAB_SIZE) < 0.3, rng.integers(1, 5, VOCAB_SIZE), 0),
        prompt=rng.random(VOCAB_SIZE) < 0.3,
    )
    return dataclasses.replace(case, **changes)


def only(*token_ids: int) -> np.ndarray:
    return np.isin(np.arange(VOCAB_SIZE), token_ids)


SOME = only(*range(5, 50, 3), 60)
SOME_BIAS = np.where(only(3, 11), 2.5, np.where(only(40), -1.5, 0.0))
CASES = {
    "frequency": {"frequency": 0.6},
    "presence": {"presence": -1.2},
    "repetition": {"repetition": 1.7},
    "repetition_below_1": {"repetition": 0.6},
    "logit_bias": {"bias": SOME_BIAS},
    "allowed": {"bias": np.where(SOME, 0.0, -np.inf)},
    "bad": {"bias": np.where(only(0, 7, 60), -np.inf, 0.0)},
    "min_tokens": {"ends": (2, 33, 60), "must_go_on": True},
    "ends_are_allowed_later": {"ends": (2, 33, 60)},
    "mask": {"mask": SOME},
    "one_token_left": {"mask": only(60)},
    "greedy": {"temperature": 0.0, "frequency": 1.9, "repetition": 1.3, "bias": SOME_BIAS, "mask": SOME},
    "min_p": {"min_p": 0.15},
    "min_p_top_k_top_p": {"min_p": 0.05, "top_k": 9, "top_p": 0.83, "temperature": 1.4},
    "all": {
        "temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition": 1.2, "frequency": 0.3,
        "presence": 0.4, "bias": np.where(only(9), -np.inf, SOME_BIAS), "ends": (5, 60), "must_go_on": True,
        "mask": SOME,
    },
}  # fmt: skip


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_bans_do_not_hide_logits_that_are_not_finite(tp: int, value: float):
    logits = new_case().logits.copy()
    logits[2] = value
    for changes in ({"mask": SOME}, {"bias": np.where(SOME, 0.0, -np.inf)}, {"temperature": 0.0, "mask": SOME}):
        case = new_case(logits=logits, has_logprobs=True, **changes)
        assert not SOME[2]
        state, last_tokens, sampled = case.run(tp, 1, 7)
        assert (np.asarray(sampled.tokens) == NO_TOKEN).all() and last_tokens[1] == NO_TOKEN
        np.testing.assert_array_equal(np.asarray(state.history)[1, :VOCAB_SIZE] & COUNT, case.counts)  # counts none


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_tokens_come_with_their_exact_probability(tp: int, name: str, num_draws: int):
    if num_draws < 50_000 and tp != 4:
        pytest.skip("one TP size is enough in `make test`, where the next test compares them; `make sample` runs all")
    case = new_case(**CASES[name])
    expected, counts = case.probabilities(), np.zeros(VOCAB_SIZE)
    num_rows = NUM_ROWS if num_draws < 50_000 else 8 * NUM_ROWS
    for call in range(-(-num_draws // num_rows)):  # positions of one request and position 7 of many, by turns
        positions = np.arange(num_rows) if call % 2 else 7
        seeds = call if call % 2 else np.arange(num_rows) + num_rows * call
        _, _, sampled = case.run(tp, seeds, positions, num_rows)
        counts += np.bincount(np.asarray(sampled.tokens), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0, "a dropped token was drawn"
    check_frequencies(counts, expected)


def check_frequencies(counts: np.ndarray, expected: np.ndarray) -> None:
    likely = expected * counts.sum() >= 5  # chi-squared needs some of each; the rest is one class
    observed = np.array([*counts[likely], counts[~likely].sum()])
    wanted = np.array([*expected[likely], expected[~likely].sum()]) * counts.sum()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4
    else:
        assert observed[0] == counts.sum()


@pytest.mark.parametrize("name", CASES)
def test_the_same_token_on_any_number_of_shards(name: str):
    case, positions = new_case(**CASES[name]), np.arange(NUM_ROWS)
    alone = np.asarray(case.run(1, 5, positions)[2].tokens)
    for tp in (4, 8):
        np.testing.assert_array_equal(np.asarray(case.run(tp, 5, positions)[2].tokens), alone)


# --- what is kept


@pytest.mark.parametrize("tp", TP_SIZES)
def test_tokens_are_counted_in_their_row_alone(tp: int):
    case = new_case()
    num_local = -(-VOCAB_SIZE // tp)
    empty = np.zeros((STATE_ROWS, num_local * tp), np.int32)
    rows = np.full(NUM_ROWS, NO_ROW)
    rows[:4] = [2, 0, 1, 1]
    packed = case.packed(SHAPE, np.arange(NUM_ROWS), np.zeros(NUM_ROWS), rows)
    flags = packed[SHAPE.fields["flags"]]
    flags[2] &= ~SAMPLES  # a chunk that does not end its prompt
    flags[3] &= ~ADJUSTS  # a row that keeps no history
    logits = np.zeros((NUM_ROWS, num_local * tp), np.float32)
    masks = np.full((NUM_ROWS, 2), 2**32 - 1, np.uint32)
    state = ProcessorState(empty, empty.astype(np.float32))
    state, last_tokens, sampled = program(tp)(state, np.full(STATE_ROWS, -1, np.int32), logits, packed, masks)
    tokens = np.asarray(sampled.tokens)
    expected = np.zeros_like(empty)
    expected[2, tokens[0]] = expected[0, tokens[1]] = 1
    np.testing.assert_array_equal(state.history, expected)
    assert np.asarray(last_tokens).tolist()[0] == tokens[1] and np.asarray(last_tokens).tolist()[2] == tokens[0]


@pytest.mark.parametrize("tp", TP_SIZES)
def test_a_row_is_set_on_every_shard(tp: int):
    state_specs = ProcessorState(VOCAB, VOCAB)
    set_row = jax.jit(
        jax.shard_map(
            logits_processors.set_slot_adjustments,
            mesh=make_mesh(tp),
            in_specs=(state_specs, ANY, ANY, ANY),
            out_specs=state_specs,
        )
    )
    state = ProcessorState(np.zeros((3, 16), np.int32), np.ones((3, 16), np.float32))
    new = set_row(state, np.array([1]), np.arange(16, dtype=np.int32), -np.arange(16, dtype=np.float32))
    np.testing.assert_array_equal(new.history[1], np.arange(16))
    np.testing.assert_array_equal(new.bias[1], -np.arange(16))
    np.testing.assert_array_equal(np.asarray(new.history)[[0, 2]], 0)
    np.testing.assert_array_equal(np.asarray(new.bias)[[0, 2]], 1)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("vocab_size", [61, 64, 333, 1000])
def test_every_bit_of_a_mask_reaches_its_token(tp: int, vocab_size: int):
    num_local = -(-vocab_size // tp)
    mask = np.random.default_rng(vocab_size).random((5, vocab_size)) < 0.5
    spread = jax.jit(
        jax.shard_map(
            functools.partial(logits_processors._local_bits, num_local=num_local),
            mesh=make_mesh(tp), in_specs=ANY, out_specs=VOCAB,
        )
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(spread(words(mask)))[:, :vocab_size], mask)


# --- log-probabilities


def over_shards(tp: int, vocab_size: int):
    specs = jax.tree.map(lambda _: ANY, logits_processors.Logprobs(0, 0, 0))
    function = functools.partial(logits_processors._logprobs, vocab_size=vocab_size)
    sharded = jax.shard_map(
        function, mesh=make_mesh(tp), in_specs=(VOCAB, ANY), out_specs=specs, check_vma=False
    )  # fmt: skip
    return jax.jit(sharded)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("vocab_size", [7, 61, 1000, 5003])
@pytest.mark.parametrize("has_ties", [False, True])
def test_log_probabilities_and_the_likeliest_tokens(tp: int, vocab_size: int, has_ties: bool):
    rng = np.random.default_rng(vocab_size)
    logits = (5 * rng.standard_normal((16, vocab_size))).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    tokens = rng.integers(0, vocab_size, 16).astype(np.int32)
    padded = np.pad(logits, ((0, 0), (0, -vocab_size % tp)), constant_values=CHEATING_LOGIT)
    found = over_shards(tp, vocab_size)(padded, tokens)
    wide = logits.astype(np.float64)
    expected = wide - wide.max(axis=1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    order = np.argsort(-wide, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, axis=1), atol=2e-5)
    np.testing.assert_allclose(found.token, expected[np.arange(16), tokens], atol=2e-5)


def test_log_probabilities_are_of_the_models_own_distribution():
    """For the token that was drawn under every processor, they are those of the bare logits."""
    case = new_case(**CASES["all"], has_logprobs=True)
    _, _, sampled = case.run(4, 1, np.arange(NUM_ROWS))
    expected = new_case().logits.astype(np.float64)
    expected -= np.log(np.exp(expected).sum())
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_allclose(sampled.logprobs.token, expected[tokens], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(sampled.logprobs.top_ids)[0], np.argsort(-expected, kind="stable")[:20])


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_may_be_of_the_distribution_that_is_sampled_from(tp: int, name: str):
    case = new_case(**CASES[name], has_logprobs=True, reports_processed=True)
    _, _, sampled = case.run(tp, 1, np.arange(NUM_ROWS))
    if case.temperature == 0.0:  # all that may be sampled, not the one token that is
        case = dataclasses.replace(case, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    with np.errstate(divide="ignore"):
        expected = np.log(case.probabilities())
    tokens, found = np.asarray(sampled.tokens), sampled.logprobs
    np.testing.assert_allclose(found.token, expected[tokens], atol=2e-5)
    top = np.asarray(found.top)[0]
    np.testing.assert_allclose(top, np.sort(expected)[::-1][: len(top)], atol=2e-5)
    possible = np.isfinite(top)
    np.testing.assert_allclose(expected[np.asarray(found.top_ids)[0][possible]], top[possible], atol=2e-5)


# --- sizes


@pytest.mark.parametrize(("largest", "smallest"), [(1, 1), (3, 1), (8, 1), (64, 1), (100, 1), (48, 64), (512, 64)])
def test_every_step_has_a_size(largest: int, smallest: int):
    sizes = processor_sizes(largest, smallest)
    assert sizes[-1] == largest and len(sizes) <= 4 and list(sizes) == sorted(set(sizes))
    for needed in range(1, largest + 1):
        assert needed <= next_size(sizes, needed) <= max(8 * needed, smallest)
    assert jnp.int32(IN_PROMPT + ENDS) > 0  # a history fits int32
