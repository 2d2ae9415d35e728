"""Tests the counting of draft trees: by hand, against other ways to count, and on the demo model with its head."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from meshserve.benchmarks.engine import draft_trees
from meshserve.benchmarks.lib import token_trees
from meshserve.benchmarks.lib.token_trees import UNRANKED, LookedUp, StepTimes, gain, looked_up
from meshserve.deploy.demo.head_network import HeadSizes, draft_logits
from meshserve.runtime.text.tokenizer import open_tokenizer
from meshserve.runtime.weights.locate import find_model
from tests.deploy.test_demo_model import VERSE

DEPTH, WIDTH, SPREAD = 3, 8, 0.7


def test_a_step_begins_after_the_accepted_drafts_and_their_successor():
    found = gain(np.array([[2, 0, 0, 0, 1, 9], [0, 0, 0, 0, 0, 0]]))
    assert found.tokens == (3 + 1 + 2 + 6) / (3 + 6) and found.error > 0
    assert gain(np.array([[1, 0, 1, 0], [1, 0, 1, 0]])) == (2.0, 0.0)


def test_a_tree_accepts_its_longest_path_that_the_text_follows():
    ranks = np.array([[[0, 0, 0], [0, 1, 0], [1, 0, 0], [2, 0, 0], [0, UNRANKED, 0]]])
    assert token_trees.accepted_by_tree(ranks, token_trees.chain(2)).tolist() == [[2, 1, 0, 0, 1]]
    tree = token_trees.side_by_side((3, 2))
    assert sorted(tree) == [(0,), (0, 0), (0, 0, 0), (1,), (1, 0)]
    assert token_trees.accepted_by_tree(ranks, tree).tolist() == [[3, 1, 2, 0, 1]]


def test_no_tree_of_as_many_nodes_accepts_more_than_the_best_one():
    rng = np.random.default_rng(0)
    ranks = np.where(rng.random((4, 50, 3)) < 0.2, UNRANKED, rng.geometric(0.6, (4, 50, 3)) - 1)
    best = token_trees.best_fixed_tree(ranks, 5, 3)
    assert len(best) == 5 and all(path[:-1] in best or len(path) == 1 for path in best)
    paths = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
    most = token_trees.accepted_by_tree(ranks, best).mean()
    for _ in range(300):
        other: list[tuple[int, ...]] = []
        while len(other) < 5:
            path = paths[rng.integers(len(paths))]
            if path not in other and (len(path) == 1 or path[:-1] in other):
                other.append(path)
        assert token_trees.accepted_by_tree(ranks, other).mean() <= most


def test_prompt_lookup_finds_the_last_continuation_and_another_one():
    text = [1, 2, 3, 9, 1, 2, 4, 7, 1, 2, 3, 9, 5]
    found = list(looked_up(text, 10, 2, 3))
    assert found == [LookedUp(0, 2), LookedUp(1, None), LookedUp(0, None)]  # after [1, 2], [2, 3] and [3, 9]
    assert list(looked_up([1, 2, 3, 4], 3, 2, 3)) == [None]
    assert next(looked_up([1, 2, 1, 2, 1, 2, 1], 4, 2, 3)) == LookedUp(3, None)  # the span repeats


def test_speed_counts_positions_passes_and_the_host():
    times = StepTimes({1: 5.0, 4: 5.6, 8: 6.0}, 0.1, 0.3, 0.4, 1.0)
    assert times.speed(1.0, 1, 0, 0, is_chain=True) == pytest.approx(1000 / 5.0)
    assert times.speed(2.0, 1, 3, 3, is_chain=True) == pytest.approx(2000 / (5.6 + 0.9 + 1.0))
    assert times.speed(2.0, 2, 2, 1, is_chain=False) == pytest.approx(4000 / (5.8 + 0.1 + 0.4 + 1.0))
    assert times.speed(2.0, 3, 3, 1, is_chain=False) == 0.0  # nobody measured so many positions


@pytest.fixture(scope="module")
def verse() -> draft_trees.Drafting:
    ids = np.asarray([open_tokenizer(find_model("demo").small).encode(VERSE)[:60]], np.int32)
    return draft_trees._drafting(ids, np.zeros(1, np.uint32), 0.0)[0]


def test_a_grown_tree_has_the_ranks_and_confidences_of_the_formulas(verse: draft_trees.Drafting):
    ranks = np.asarray(draft_trees._ranks(verse, DEPTH)[0])
    places = draft_trees._places(verse, DEPTH, WIDTH, SPREAD)
    is_near = ranks[..., 0] < 2 * WIDTH
    assert (places[..., 0, 0] == np.where(is_near, ranks[..., 0], UNRANKED)).all() and is_near.mean() > 0.3

    confidence = 0.0
    _, of_text = draft_trees._grown(verse, DEPTH, WIDTH, SPREAD)
    embedded = verse.embedding[verse.ids]
    for step, logits in enumerate(draft_logits(verse.head, verse.states, embedded, HeadSizes(), DEPTH)):
        scores, is_next = draft_trees._scores_and_next(verse, logits, step)
        logs = jax.nn.log_softmax(scores / SPREAD, axis=-1)
        confidence = confidence + np.where(is_next, logs, 0.0).sum(axis=-1)
        found = np.asarray(of_text[step])
        is_found = np.isfinite(found)
        assert is_found.sum() > 2
        np.testing.assert_allclose(found[is_found], confidence[is_found], rtol=1e-4, atol=1e-4)


def test_the_served_models_own_logits_are_always_right_at_temperature_0():
    ids = np.asarray([open_tokenizer(find_model("demo").small).encode(VERSE)[:60]], np.int32)
    drafting, best = draft_trees._drafting(ids, np.zeros(1, np.uint32), 0.0)
    ranks = np.asarray(draft_trees._ranks(drafting, 1, 1.0)[0])[0, :, 0]
    is_best = best[0, 1 : 1 + len(ranks)] == ids[0, 2 : 2 + len(ranks)]
    is_known = np.isin(ids[0, 2 : 2 + len(ranks)], np.asarray(drafting.token_ids))
    assert (ranks[is_best & is_known] == 0).all() and (is_best & is_known).sum() > 3


def test_texts_of_the_engine_are_those_of_the_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "play.txt").write_text(VERSE)
    assert not draft_trees.main(
        ["--text", str(tmp_path / "play.txt"), "--requests", "4", "--input-tokens", "16", "--output-tokens", "24"]
        + [
            "--temperature",
            "1",
            "--depth",
            "2",
            "--positions",
            "4",
            "--cpu-devices",
            "8",
            "--lookup-text",
            str(tmp_path / "play.txt"),
        ]
    )
    printed = capsys.readouterr().out
    assert "chain of 2 " in printed and "batch 4: confidence" in printed and "play.txt: a match at" in printed
