"""Samples after draft tokens are those of one step after another, over vocabulary shards."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.program.draft_rows import fill_draft_rows
from meshserve.runtime.program.processors import logits_processors
from meshserve.runtime.program.processors.contract import COUNT, ProcessorState
from meshserve.runtime.program.processors.processor_batch import ADJUSTS, SAMPLES, ProcessorShape
from meshserve.runtime.program.sampling import SamplingBatch, sample
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh
from tests.runtime.program.test_logits_processors import CASES, STATE_ROWS, Case, check_frequencies, new_case, only
from tests.runtime.program.test_logits_processors import program as processor_program

NUM_REQUESTS, NUM_DRAFTS, VOCAB_SIZE = 24, 3, 21
NUM_ROWS = NUM_REQUESTS * (1 + NUM_DRAFTS)
NUM_SLOTS = NUM_REQUESTS + 5
VOCAB, ANY = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()


@functools.cache
def program(tp: int, shape: ProcessorShape):
    state = ProcessorState(VOCAB, VOCAB)
    choose = functools.partial(sample, vocab_size=VOCAB_SIZE, is_unrolled=False)
    function = functools.partial(logits_processors.sample_processed, shape=shape, vocab_size=VOCAB_SIZE, choose=choose)
    return jax.jit(
        jax.shard_map(
            function, mesh=make_mesh(tp), in_specs=(state, ANY, VOCAB, ANY, ANY), out_specs=(state, ANY, ANY),
            check_vma=False,
        )
    )  # fmt: skip


class World:
    """Requests with penalties and grammar masks, and the logits at each of their next positions."""

    def __init__(self, tp: int, temperature: float):
        rng = np.random.default_rng(5)
        self.tp, self.temperature = tp, temperature
        self.width = -(-VOCAB_SIZE // tp) * tp
        self.slots = rng.permutation(NUM_SLOTS)[:NUM_REQUESTS].astype(np.int32)
        self.logits = rng.standard_normal((1 + NUM_DRAFTS, NUM_REQUESTS, self.width)).astype(np.float32)
        self.masks = rng.integers(0, 2**32, (1 + NUM_DRAFTS, NUM_REQUESTS, 1), np.uint32) | 1
        self.first = rng.integers(5, 90, NUM_REQUESTS)  # position of the first sample
        history = np.where(rng.random((NUM_SLOTS, self.width)) < 0.3, rng.integers(1, 4, (NUM_SLOTS, self.width)), 0)
        self.state = ProcessorState(history.astype(np.int32), np.zeros(history.shape, np.float32))

    def run(self, state: ProcessorState, rows: list[tuple[int, int]], drafts: Sequence[Sequence[int]] = ()):
        """Samples the given (request, place) rows, those of drafts last. Returns the state and their tokens."""
        shape = ProcessorShape(NUM_ROWS, NUM_DRAFTS)
        packed = np.zeros(shape.size, np.int32)
        fields = {name: packed[place] for name, place in shape.fields.items()}
        request, place = np.array(rows).T
        count, is_first = len(rows), np.arange(len(rows)) < len(rows) - sum(map(len, drafts))
        fields["slots"][:] = NUM_SLOTS
        fields["slots"][:count] = np.where(is_first, self.slots[request], NUM_SLOTS)
        fields["flags"][:count] = SAMPLES | ADJUSTS
        fields["sample_position"][:count] = self.first[request] + place
        fields["seed_low"][:count] = request
        values = {"temperature": self.temperature, "top_p": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.8}
        for name, value in values.items():
            fields[name][:count] = np.float32(value).view(np.int32)
        fields["top_k"][:count] = 15
        fields["mode"][0] = SamplingMode.FILTERED if self.temperature else SamplingMode.GREEDY
        fill_draft_rows(fields, self.slots[request], drafts)
        logits = np.zeros((shape.num_requests, self.width), np.float32)
        masks = np.ones((shape.num_requests, 1), np.uint32)
        logits[:count], masks[:count] = self.logits[place, request], self.masks[place, request]
        last_tokens = np.zeros(NUM_SLOTS, np.int32)
        state, _, sampled = program(self.tp, shape)(state, last_tokens, logits, packed, masks)
        return state, np.asarray(sampled.tokens)[:count]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_samples_after_drafts_are_those_of_one_step_after_another(tp: int, temperature: float):
    world, rng = World(tp, temperature), np.random.default_rng(7)
    state, alive = world.state, list(range(NUM_REQUESTS))
    tokens: list[list[int]] = [[] for _ in alive]
    drafts: list[list[int]] = [[] for _ in alive]
    for place in range(1 + NUM_DRAFTS):  # one step after another, while drafts hold
        state, sampled = world.run(state, [(request, place) for request in alive])
        for request, token_id in zip(list(alive), sampled.tolist(), strict=True):
            tokens[request].append(token_id)
            kind = rng.choice(["right", "wrong", "none"], p=[0.7, 0.15, 0.15]) if place < NUM_DRAFTS else "none"
            if kind == "right":
                drafts[request].append(token_id)
                continue
            alive.remove(request)
            if kind == "wrong":
                rest = rng.integers(0, VOCAB_SIZE, NUM_DRAFTS - place - 1)
                drafts[request] += [(token_id + 1) % VOCAB_SIZE, *rest.tolist()]
    rows = [(request, 0) for request in range(NUM_REQUESTS)]
    rows += [(request, 1 + index) for request, its in enumerate(drafts) for index in range(len(its))]
    together, sampled = world.run(world.state, rows, drafts)
    found = {row: token_id for row, token_id in zip(rows, sampled.tolist(), strict=True)}
    for request, its_tokens in enumerate(tokens):
        assert [found[request, place] for place in range(len(its_tokens))] == its_tokens
    np.testing.assert_array_equal(together.history, state.history)
    lengths = {len(its_tokens) for its_tokens in tokens}
    assert lengths == {1, 2, 3, 4}  # drafts that hold, and some that do not
    assert (np.asarray(state.history) & COUNT).sum() > (world.state.history & COUNT).sum()


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_tokens_after_a_draft_that_holds_come_with_their_exact_probability(tp: int, name: str, num_draws: int):
    """So do those before it. Each filter and processor, and all of them together."""
    if num_draws < 50_000 and (tp != 4 or name not in ("all", "mask")):
        pytest.skip("two cases are enough in `make test`; `make sample` runs all")
    case = new_case(**CASES[name])
    draft = int(np.argmax(case.probabilities()))
    after = dataclasses.replace(case, counts=case.counts + only(draft))
    first_counts, counts = np.zeros(len(case.logits)), np.zeros(len(case.logits))
    num_requests = 2048 if num_draws < 50_000 else 16_384
    for call in range(-(-num_draws // num_requests)):
        first, second = drawn_with_draft(case, tp, draft, np.arange(num_requests) + num_requests * call)
        first_counts += np.bincount(first, minlength=len(counts))
        counts += np.bincount(second[first == draft], minlength=len(counts))
    for observed, expected in ((first_counts, case.probabilities()), (counts, after.probabilities())):
        assert observed[expected == 0].sum() == 0, "a dropped token was drawn"
        check_frequencies(observed, expected)


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_drafts_that_a_head_draws_change_no_probability(tp: int, name: str, num_draws: int):
    """It draws from a distribution and a vocabulary of its own, with the noise of the request, as heads do."""
    if num_draws < 50_000 and (tp != 4 or name not in ("all", "mask")):
        pytest.skip("two cases are enough in `make test`; `make sample` runs all")
    case = new_case(**CASES[name])
    likely = int(np.argmax(case.probabilities()))
    after = dataclasses.replace(case, counts=case.counts + only(likely))
    rng = np.random.default_rng(3)
    of_head = np.sort(np.append(rng.choice(np.delete(np.arange(len(case.logits)), likely), 40, replace=False), likely))
    logits = case.logits[of_head] + rng.normal(scale=0.7, size=len(of_head))
    first_counts, counts, num_held = np.zeros(len(case.logits)), np.zeros(len(case.logits)), 0
    num_requests = 2048 if num_draws < 50_000 else 16_384
    for call in range(-(-num_draws // num_requests)):
        seeds = np.arange(num_requests) + num_requests * call
        drafts = drawn_by_head(tp, of_head, logits, case.temperature, seeds)
        first, second = drawn_with_draft(case, tp, drafts, seeds)
        first_counts += np.bincount(first, minlength=len(counts))
        is_held = first == drafts
        num_held += is_held.sum()
        counts += np.bincount(second[is_held & (drafts == likely)], minlength=len(counts))
    assert num_held >= counts.sum() > 0 or not case.temperature  # a greedy head may be wrong every time
    for observed, expected in ((first_counts, case.probabilities()), (counts, after.probabilities())):
        assert observed[expected == 0].sum() == 0, "a dropped token was drawn"
        if observed.any():
            check_frequencies(observed, expected)


def drawn_by_head(tp: int, of_head: np.ndarray, logits: np.ndarray, temperature: float, seeds: np.ndarray):
    """Returns the draft token that a head draws for each seed, given the tokens of its vocabulary and their logits."""
    count, padding = len(seeds), -len(of_head) % tp
    zeros = np.zeros(count, np.int32)
    params = SamplingBatch(
        temperature=np.full(count, temperature, np.float32), top_k=zeros, top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32), seed_low=seeds.astype(np.uint32), seed_high=zeros.astype(np.uint32),
        position=np.full(count, 7, np.int32),
    )  # fmt: skip
    rows = np.broadcast_to(np.pad(logits, (0, padding)).astype(np.float32), (count, len(logits) + padding))
    token_ids = np.pad(of_head, (0, padding), constant_values=len(of_head) + 10**6).astype(np.int32)
    mode = SamplingMode.FILTERED if temperature else SamplingMode.GREEDY
    return np.asarray(head_program(tp)(rows, params, np.int32(mode), token_ids))


@functools.cache
def head_program(tp: int):
    def draw(logits, params, mode, token_ids):
        return sample(logits, params, mode, vocab_size=10**6, is_unrolled=False, token_ids=token_ids)

    of_shards = PartitionSpec(TENSOR_AXIS)
    return jax.jit(
        jax.shard_map(draw, mesh=make_mesh(tp), in_specs=(VOCAB, ANY, ANY, of_shards), out_specs=ANY, check_vma=False)
    )


def drawn_with_draft(case: Case, tp: int, draft: int | np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what requests with these seeds sample, and what they sample after the draft token, one or one each."""
    num_requests, num_rows = len(seeds), 2 * len(seeds)
    shape = ProcessorShape(num_rows, 1)
    positions = np.repeat([7, 8], num_requests)
    packed = case.packed(shape, np.tile(seeds, 2), positions, np.ones(num_rows, np.int32))
    fields = {field: packed[place] for field, place in shape.fields.items()}
    fields["slots"][num_requests:] = STATE_ROWS  # no request's last token
    fill_draft_rows(fields, np.ones(num_rows, np.int32), np.broadcast_to(draft, num_requests)[:, None].tolist())
    state, logits, masks = case.operands(tp, num_rows)
    run = processor_program(tp, shape=shape)
    _, _, sampled = run(state, np.zeros(STATE_ROWS, np.int32), logits, packed, masks)
    first, second = np.split(np.asarray(sampled.tokens), 2)
    return first, second
