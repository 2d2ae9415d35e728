"""Provides inputs of the fused QK-norm and RoPE kernel, and the results of the model's own operations for them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.linear import rms_norm
from meshserve.kernels.paged_attention import PagedBatch, RopeSettings, write_kv
from meshserve.runtime.model.layers.rope import rotate

from .comparing import assert_has_values

NUM_LAYERS, LAYER = 3, 1
# Tolerance relative to a head's largest element: one bfloat16 step, because the squares are summed in another order.
STEP = 2.0**-7


@dataclass(frozen=True)
class Case:
    head_dim: int
    group: int
    kv_heads: int
    page_size: int
    chunks: tuple[tuple[int, int], ...]  # (first position, number of tokens) of each request
    num_padding: int = 0


CASES = (
    Case(128, 4, 2, 32, ((0, 70), (31, 2), (500, 1)), num_padding=3),
    Case(64, 2, 3, 16, ((7, 20), (0, 1)), num_padding=1),
    Case(128, 8, 1, 64, ((63, 3), (1000, 40))),
    Case(64, 1, 8, 16, ((3, 1), (15, 1), (16, 1), (0, 1)), num_padding=4),
)


@dataclass(frozen=True)
class Inputs:
    rows: jax.Array
    cache: jax.Array
    batch: PagedBatch
    settings: RopeSettings


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Makes inputs on the default device; the cache is full of NaN, with its pages in random order."""
    draw = np.random.default_rng(seed)
    positions = [first + i for first, count in case.chunks for i in range(count)] + [-1] * case.num_padding
    requests = [index for index, (_, count) in enumerate(case.chunks) for _ in range(count)] + [0] * case.num_padding
    max_pages = max(-(-(first + count) // case.page_size) for first, count in case.chunks)
    num_pages = len(case.chunks) * max_pages + 5
    table = draw.permutation(num_pages)[: len(case.chunks) * max_pages].reshape(len(case.chunks), max_pages)
    shape = (NUM_LAYERS, num_pages, case.kv_heads, 2, case.page_size, case.head_dim)
    width = case.kv_heads * (case.group + 2) * case.head_dim
    angles = draw.uniform(-100, 100, (len(positions), case.head_dim // 2))
    gains = (jnp.asarray(draw.uniform(0.5, 2.0, (NUM_LAYERS, case.head_dim)), jnp.bfloat16) for _ in range(2))
    return Inputs(
        rows=jnp.asarray(draw.standard_normal((len(positions), width)), jnp.bfloat16),
        cache=jnp.full(shape, jnp.nan, jnp.bfloat16),
        batch=PagedBatch(*(jnp.asarray(array, jnp.int32) for array in (positions, requests, table))),
        settings=RopeSettings(*gains, *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)), 1e-6),
    )


def expected(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Computes q and the cache with separate operations on a CPU."""
    inputs_here = jax.device_put((inputs.rows, inputs.cache, inputs.batch, inputs.settings), jax.devices("cpu")[0])
    rows, cache, batch, settings = inputs_here
    heads = rows.reshape(rows.shape[0], cache.shape[2], -1, cache.shape[5])
    q = rotate(rms_norm(heads[:, :, :-2], settings.q_norm[LAYER], settings.epsilon), settings.cos, settings.sin)
    k = rotate(rms_norm(heads[:, :, -2], settings.k_norm[LAYER], settings.epsilon), settings.cos, settings.sin)
    return np.asarray(q), np.asarray(write_kv(cache, k, heads[:, :, -1], batch, layer=LAYER))


def check(inputs: Inputs, q: np.ndarray, cache: np.ndarray) -> None:
    """Checks keys and queries up to rounding, values exactly, and that the rest of the cache is unchanged."""
    wanted_q, wanted = expected(inputs)
    is_real = np.asarray(inputs.batch.positions) >= 0
    _assert_close(q[is_real], wanted_q[is_real])
    is_written = ~np.isnan(wanted[:, :, :, 0].astype(np.float32))
    _assert_close(cache[:, :, :, 0][is_written], wanted[:, :, :, 0][is_written])
    values, wanted_values = (array[:, :, :, 1].astype(np.float32) for array in (cache, wanted))
    np.testing.assert_array_equal(values, wanted_values)
    assert np.isnan(cache[:, :, :, 0][~is_written].astype(np.float32)).all()


def _assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    got, wanted = got.astype(np.float32), wanted.astype(np.float32)
    assert_has_values(wanted)
    assert np.abs(got - wanted).max() <= STEP * np.abs(wanted).max()
    assert (got == wanted).mean() > 0.9
