"""How heads, vocabulary and widths fall onto shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshserve.sharding.expert_layout import ExpertLayout, moved_experts
from meshserve.sharding.layout import ShardLayout, round_up, shard_layout


def make_layout(tp: int, num_query_heads: int = 16, num_kv_heads: int = 8, **sizes: int) -> ShardLayout:
    sizes = {"vocab_size": 1000, "mlp_dim": 96} | sizes
    return shard_layout(num_shards=tp, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, **sizes)


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query heads, KV heads, and a TP size that divides the query heads."""
    num_kv_heads = draw(st.integers(1, 12))
    num_query_heads = num_kv_heads * draw(st.integers(1, 12))
    tp_sizes = [tp_size for tp_size in range(1, num_query_heads + 1) if num_query_heads % tp_size == 0]
    return num_query_heads, num_kv_heads, draw(st.sampled_from(tp_sizes))


@given(head_counts())
def test_every_query_head_is_in_a_group_of_its_own_kv_head(counts: tuple[int, int, int]):
    num_query_heads, num_kv_heads, tp = counts
    layout = make_layout(tp, num_query_heads, num_kv_heads)
    assert layout.num_groups % tp == 0, "a shard holds whole groups"
    assert layout.num_groups * layout.group_size == num_query_heads
    queries_of_kv_head = num_query_heads // num_kv_heads
    for query_head in range(num_query_heads):
        assert layout.kv_head(query_head // layout.group_size) == query_head // queries_of_kv_head
    kv_heads = [layout.kv_head(group) for group in range(layout.num_groups)]
    assert kv_heads == sorted(kv_heads) and set(kv_heads) == set(range(num_kv_heads))


@given(head_counts())
def test_kv_heads_are_repeated_only_as_often_as_they_must(counts: tuple[int, int, int]):
    """The cache costs a page for every repeat. Shards must begin and end between groups, and groups within KV heads."""
    num_query_heads, num_kv_heads, tp = counts
    layout = make_layout(tp, num_query_heads, num_kv_heads)
    if num_kv_heads % tp == 0:
        assert layout.repeats == 1
    elif tp % num_kv_heads == 0:
        assert layout.num_groups == tp
    larger_groups = range(layout.group_size + 1, num_query_heads // num_kv_heads + 1)
    for size in larger_groups:
        assert (num_query_heads // num_kv_heads) % size or (num_query_heads // tp) % size, f"groups of {size} would do"


@pytest.mark.parametrize(
    ("tp", "kv_heads"),
    [(2, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3]), (16, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)],
)
def test_repeated_kv_heads_are_neighbours(tp: int, kv_heads: list[int]):
    layout = make_layout(tp, num_query_heads=32, num_kv_heads=4)
    assert [layout.kv_head(group) for group in range(layout.num_groups)] == kv_heads


def test_a_tp_size_between_the_kv_heads_splits_groups_evenly():
    """6 query heads over 2 KV heads on 3 shards: groups of 1, so that the middle shard may read both KV heads."""
    layout = make_layout(3, num_query_heads=6, num_kv_heads=2)
    assert (layout.group_size, layout.num_groups, layout.repeats) == (1, 6, 3)


@given(st.integers(1, 8), st.integers(1, 10_000), st.integers(1, 10_000))
def test_vocabulary_and_width_are_padded_by_less_than_a_row_a_shard(tp: int, vocab_size: int, mlp_dim: int):
    layout = make_layout(tp, num_query_heads=8 * tp, num_kv_heads=8, vocab_size=vocab_size, mlp_dim=mlp_dim)
    assert layout.vocab_size % tp == layout.mlp_dim % tp == 0
    assert 0 <= layout.vocab_size - vocab_size < tp
    assert 0 <= layout.mlp_dim - mlp_dim < tp


def test_a_tp_size_that_does_not_divide_the_query_heads_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"tp is 3, .* 16 query heads. Use one of 1, 2, 4, 8, 16\."):
        make_layout(3)


@pytest.mark.parametrize(("value", "multiple", "rounded"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (7, 1, 7)])
def test_round_up(value: int, multiple: int, rounded: int):
    assert round_up(value, multiple) == rounded


@pytest.mark.parametrize("is_by_expert", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_every_row_of_every_expert_is_on_one_shard(num_shards, is_by_expert):
    """12 experts of 20 rows: no multiples of 8."""
    layout = ExpertLayout(num_shards=num_shards, num_experts=12, mlp_dim=20, is_by_expert=is_by_expert)
    held = np.zeros((12, 20), int)
    for row, (expert, num_experts, start, size) in layout.rectangles():
        assert row % layout.block_experts == 0 and num_experts <= layout.block_experts
        assert size <= layout.block_mlp_dim
        held[expert : expert + num_experts, start : start + size] += 1
    assert (held == 1).all()


def test_moved_experts_cover_the_new_layout():
    old = ExpertLayout(num_shards=4, num_experts=12, mlp_dim=20, is_by_expert=False)
    new = ExpertLayout(num_shards=8, num_experts=12, mlp_dim=20, is_by_expert=True)
    values = np.arange(12 * 20).reshape(12, 20)

    def blocks(layout: ExpertLayout) -> np.ndarray:
        found = np.zeros((layout.num_rows, layout.block_mlp_dim), int)
        for row, (expert, count, start, size) in layout.rectangles():
            found[row : row + count, :size] = values[expert : expert + count, start : start + size]
        return found

    moved, source = np.zeros_like(blocks(new)), blocks(old)
    for move in moved_experts(old, new):
        rows = slice(move.row, move.row + move.num_experts), slice(move.mlp, move.mlp + move.mlp_size)
        old_rows = slice(move.old_row, move.old_row + move.num_experts)
        moved[rows] = source[old_rows, move.old_mlp : move.old_mlp + move.mlp_size]
    np.testing.assert_array_equal(moved, blocks(new))
