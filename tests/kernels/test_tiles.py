"""Tests how the GPU kernel's work is split into tiles and parts, and which shapes it refuses; needs no GPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.paged_attention import PagedBatch, cases, sm90
from meshserve.kernels.paged_attention.tiles import count_shares, most_slots, plan_parts


def tiles_one_by_one(batch: PagedBatch, tile_tokens: int) -> list[tuple[int, int, int, int]]:
    """Returns (first token, number of tokens, first position, request) per tile, in token order."""
    tiles: list[tuple[int, int, int, int]] = []
    for token, (position, request) in enumerate(zip(*map(np.asarray, batch[:2]), strict=True)):
        if position < 0:
            continue
        if tiles and tiles[-1][3] == request and tiles[-1][1] < tile_tokens:
            first, count, *rest = tiles[-1]
            tiles[-1] = (first, count + 1, *rest)
        else:
            tiles.append((token, 1, int(position), int(request)))
    return tiles


def batch_of(requests, *, padding_after=(), num_rows: int | None = None) -> PagedBatch:
    """Makes a batch; `padding_after` lists the requests that are followed by three padding tokens."""
    positions, token_request = [], []
    for request, (num_new, total) in enumerate(requests):
        positions += range(total - num_new, total)
        token_request += [request] * num_new
        if request in padding_after:
            positions += [-1] * 3
            token_request += [0] * 3
    rows = num_rows or max(1, len(requests))
    return PagedBatch(jnp.array(positions), jnp.array(token_request), jnp.zeros((rows, 1), jnp.int32))


@pytest.mark.parametrize(("tile_tokens", "num_shares"), [(16, 16), (32, 0), (42, 33), (128, 132)])
@pytest.mark.parametrize(
    "batch",
    [
        batch_of([(1, 1)]),
        batch_of([(1, 40), (1, 41), (1, 7)]),
        batch_of([(128, 128), (129, 300), (1, 5000), (31, 31)]),
        batch_of([(0, 0), (200, 900), (0, 0), (1, 3)], num_rows=7),
        batch_of([(1, 2), (1, 3), (64, 64)], padding_after=(0, 1, 2)),
        batch_of([(0, 0)], padding_after=(0,)),
        batch_of([(512, 16_384), (1, 30_000), (1, 2048), (1, 2047)], padding_after=(1,)),
        batch_of([(1, 1_000_000)]),
        *(cases.make_inputs(case, seed=0).batch for case in cases.MATRIX_CASES[-8:]),
    ],
)
def test_every_token_is_in_one_tile_and_every_block_of_its_keys_in_one_part(batch, tile_tokens, num_shares):
    parts = np.asarray(plan_parts(batch, tile_tokens=tile_tokens, num_shares=num_shares))
    used = parts[parts[:, 1] > 0]
    assert not parts[len(used) :].any(), "unused entries come last"
    tiles, cuts = np.unique(used[:, :4], axis=0), {}
    assert sorted(map(tuple, tiles.tolist())) == sorted(tiles_one_by_one(batch, tile_tokens))
    for *tile, index, num_parts, first_slot, unused in used.tolist():
        cuts.setdefault((*tile, num_parts, first_slot), []).append(index)
        assert unused == 0
    assert len(cuts) == len(tiles)
    assert all(sorted(indices) == list(range(num_parts)) for (*_, num_parts, _), indices in cuts.items())
    slots = [first_slot + index for *_, index, num_parts, first_slot, _ in used.tolist() if num_parts > 1]
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= most_slots(num_shares)


def num_blocks_of(parts: np.ndarray) -> np.ndarray:
    """Returns the number of blocks of 128 keys in each used part."""
    num_blocks = -(-(parts[:, 1] + parts[:, 2]) // 128)
    index, num_parts = parts[:, 4], parts[:, 5]
    return (index + 1) * num_blocks // num_parts - index * num_blocks // num_parts


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(
    "requests",
    [
        [(1, 32_768)],
        [(1, 32_768)] + [(1, 1024)] * 127,
        [(512, 16_384)],
        [(512, 512), (1, 100_000), (1, 2048)],
        [(512, 512)] + [(1, 1024)] * 8,
    ],
    ids=str,
)
def test_the_longest_come_first_and_none_is_much_longer_than_a_multiprocessors_share(requests, kv_heads):
    num_shares = count_shares(kv_heads=kv_heads, max_keys=131_072)
    parts = np.asarray(plan_parts(batch_of(requests), tile_tokens=32, num_shares=num_shares))
    used = parts[parts[:, 1] > 0]
    num_blocks = num_blocks_of(used)
    assert (np.diff(num_blocks) <= 0).all()
    share = kv_heads * num_blocks.sum() / 132
    assert num_blocks[0] <= max(1.5 * share + 1, 7), "fewer than 8 blocks are not worth splitting"
    assert (num_blocks[used[:, 5] > 1] >= 4).all()


def test_short_contexts_keep_no_memory_for_parts():
    assert count_shares(kv_heads=8, max_keys=1023) == 0 < count_shares(kv_heads=8, max_keys=1024)
    assert most_slots(0) == 0


def test_a_program_of_many_layers_plans_once():
    """Each layer's kernel call plans the tiles; XLA must detect that the plans are equal."""
    batch = batch_of([(40, 40), (1, 300)])

    @jax.jit
    def program(batch, x):
        for _ in range(6):
            x = jnp.sin(x) + plan_parts(batch, tile_tokens=32, num_shares=33).astype(jnp.float32)
        return x

    @jax.jit
    def one_layer(batch, x):
        return jnp.sin(x) + plan_parts(batch, tile_tokens=32, num_shares=33).astype(jnp.float32)

    x = jnp.zeros(plan_parts(batch, tile_tokens=32, num_shares=33).shape)

    def num_scatters(function) -> int:
        text = function.lower(batch, x).compile().as_text()
        return sum("scatter" in line.split("metadata")[0] for line in text.splitlines())

    assert num_scatters(program) == num_scatters(one_layer) > 0


def attend(*, group=4, head_dim=128, page_size=64, dtype="bfloat16", layer=0):
    q = jnp.zeros((1, 2, group, head_dim), dtype)
    cache = jnp.zeros((1, 1, 2, 2, page_size, head_dim), dtype)
    return sm90.paged_attention(q, cache, batch_of([(1, 1)]), layer=layer, scale=1.0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 32}, "head_dim is 32; 64 and 128"),
        ({"group": 9}, "there are 9 query heads per kv head; 1 to 8"),
        ({"page_size": 24}, "page_size is 24; a multiple of 16"),
        ({"dtype": "float32"}, "heads are float32; bfloat16"),
    ],
    ids=str,
)
def test_what_the_kernel_was_not_made_for_is_refused(shape, message):
    with pytest.raises(ValueError, match=f"attention 'cuda': .*{message}.*Use 'reference'"):
        attend(**shape)


def test_a_layer_must_be_compiled_in():
    with pytest.raises(TypeError, match="unroll the layers"):
        attend(layer=jnp.int32(0))


def test_a_shape_it_takes_fails_only_for_want_of_jaxs_cuda_build(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    build.loaded.cache_clear()
    with pytest.raises(build.KernelBuildError, match=r"need jax's CUDA build: install jax\[cuda13\]"):
        attend()
