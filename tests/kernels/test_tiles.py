"""How the GPU kernel's work is cut, against the plain way to do it, and what it refuses. Runs anywhere."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.paged_attention import PagedBatch, cases, gpu
from meshserve.kernels.paged_attention.tiles import plan_tiles


def tiles_one_by_one(batch: PagedBatch, tile_tokens: int) -> list[tuple[int, int, int, int]]:
    """First token, number of tokens, first position, request: in the order of the tokens."""
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
    """`padding_after` names requests that three padding tokens follow."""
    positions, token_request = [], []
    for request, (num_new, total) in enumerate(requests):
        positions += range(total - num_new, total)
        token_request += [request] * num_new
        if request in padding_after:
            positions += [-1] * 3
            token_request += [0] * 3
    rows = num_rows or max(1, len(requests))
    return PagedBatch(jnp.array(positions), jnp.array(token_request), jnp.zeros((rows, 1), jnp.int32))


@pytest.mark.parametrize("tile_tokens", [16, 32, 42, 128])
@pytest.mark.parametrize(
    "batch",
    [
        batch_of([(1, 1)]),
        batch_of([(1, 40), (1, 41), (1, 7)]),
        batch_of([(128, 128), (129, 300), (1, 5000), (31, 31)]),
        batch_of([(0, 0), (200, 900), (0, 0), (1, 3)], num_rows=7),
        batch_of([(1, 2), (1, 3), (64, 64)], padding_after=(0, 1, 2)),
        batch_of([(0, 0)], padding_after=(0,)),
        *(cases.make_inputs(case, seed=0).batch for case in cases.MATRIX_CASES[-4:]),
    ],
)
def test_every_token_is_in_one_tile_and_the_longest_come_first(batch, tile_tokens):
    tiles = np.asarray(plan_tiles(batch, tile_tokens=tile_tokens))
    expected = tiles_one_by_one(batch, tile_tokens)
    used = tiles[tiles[:, 1] > 0]
    assert not tiles[len(used) :].any(), "unused places stand last"
    assert sorted(map(tuple, used.tolist())) == sorted(expected)
    num_keys = used[:, 1] + used[:, 2]
    assert (np.diff(num_keys) <= 0).all()


def test_a_program_of_many_layers_plans_once():
    """The kernel's call asks for the tiles in each layer; XLA must find that they are the same."""
    batch = batch_of([(40, 40), (1, 300)])

    @jax.jit
    def program(batch, x):
        for _ in range(6):
            x = jnp.sin(x) + plan_tiles(batch, tile_tokens=32).astype(jnp.float32)
        return x

    @jax.jit
    def one_layer(batch, x):
        return jnp.sin(x) + plan_tiles(batch, tile_tokens=32).astype(jnp.float32)

    x = jnp.zeros(plan_tiles(batch, tile_tokens=32).shape)

    def num_scatters(function) -> int:
        text = function.lower(batch, x).compile().as_text()
        return sum("scatter" in line.split("metadata")[0] for line in text.splitlines())

    assert num_scatters(program) == num_scatters(one_layer) > 0


def attend(*, group=4, head_dim=128, page_size=64, dtype="bfloat16", layer=0):
    q = jnp.zeros((1, 2, group, head_dim), dtype)
    cache = jnp.zeros((1, 1, 2, 2, page_size, head_dim), dtype)
    return gpu.paged_attention(q, cache, batch_of([(1, 1)]), layer=layer, scale=1.0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 32}, "head_dim is 32; 64 and 128"),
        ({"group": 9}, "9 query heads a kv head; 1 to 8"),
        ({"page_size": 24}, "24 tokens; a multiple of 16"),
        ({"dtype": "float32"}, "heads are float32, the cache float32; bfloat16"),
    ],
    ids=str,
)
def test_what_the_kernel_was_not_made_for_is_refused(shape, message):
    with pytest.raises(ValueError, match=f"attention 'cuda': .*{message}.*Take 'reference'"):
        attend(**shape)


def test_a_layer_must_be_compiled_in():
    with pytest.raises(TypeError, match="unroll the layers"):
        attend(layer=jnp.int32(0))


def test_a_shape_it_takes_fails_only_for_want_of_jaxs_cuda_build(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    build.load.cache_clear()
    with pytest.raises(build.KernelBuildError, match=r"need jax's CUDA build: install jax\[cuda13\]"):
        attend()
