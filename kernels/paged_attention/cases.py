"""Shapes, random inputs and expected results for the tests, benchmarks and tuning of paged attention.

All arrays but the batch are numpy arrays; each implementation moves them to its own device.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from . import PagedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The shape of a step.

    `requests` has a pair for each request: its number of tokens in this step, and its total number of tokens including
    these. (1, 40) decodes the 40th token, (16, 48) is the third chunk of a prefill, and (0, 0) is a request without
    tokens.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    page_size: int = 16
    dtype: str = "float32"
    cache_dtype: str = ""  # empty: as `dtype`
    num_layers: int = 2  # the last layer is tested
    num_padding_tokens: int = 0
    num_padding_requests: int = 0

    @property
    def is_zero(self) -> bool:
        """Whether all tokens are padding, so that the output holds nothing but zeros."""
        return not any(num_tokens for num_tokens, _ in self.requests)

    @property
    def num_kv_tokens(self) -> int:
        return sum(total for _, total in self.requests)

    @property
    def pages_per_request(self) -> int:
        """Returns the page count of the longest request, which is the width of the page table."""
        return max(1, *(-(-total // self.page_size) for _, total in self.requests), 0)


CASES = (
    Case(name="one-token", requests=((1, 1),)),
    Case(name="decodes-at-page-borders", requests=((1, 15), (1, 16), (1, 17), (1, 32), (1, 33))),
    Case(name="prefills-at-page-borders", requests=((15, 15), (16, 16), (17, 17))),
    Case(name="chunks-across-page-borders", requests=((2, 17), (17, 33), (16, 31))),
    Case(name="decodes-beside-chunks", requests=((1, 40), (1, 3), (20, 20), (7, 50)), kv_heads=3),
    Case(name="rows-without-tokens", requests=((0, 0), (1, 9), (0, 0), (4, 20))),
    Case(name="padding", requests=((1, 9), (4, 20)), num_padding_tokens=5, num_padding_requests=3),
    Case(name="padding-alone", requests=(), num_padding_tokens=4, num_padding_requests=2),
    Case(name="pages-of-one-token", requests=((1, 5), (3, 3)), page_size=1),
    Case(name="many-pages", requests=((1, 300), (1, 1)), kv_heads=1),
    Case(name="group-1", requests=((1, 20), (9, 9)), group=1),
    Case(name="group-5", requests=((1, 20), (9, 9)), group=5),
    Case(name="group-8", requests=((1, 20), (9, 9)), group=8),
    Case(name="head-64", requests=((1, 70), (5, 33)), head_dim=64, page_size=32),
    Case(name="head-128", requests=((1, 70), (5, 33)), head_dim=128, page_size=32, group=4),
    Case(name="bfloat16-head-64", requests=((1, 70), (5, 33)), head_dim=64, page_size=32, dtype="bfloat16"),
    Case(name="bfloat16-head-128", requests=((1, 70), (5, 33)), head_dim=128, group=4, dtype="bfloat16"),
    Case(
        name="bfloat16-mixed", requests=((1, 200), (0, 0), (1, 64), (33, 90)), head_dim=128, page_size=64, group=8,
        dtype="bfloat16", num_padding_tokens=3, num_padding_requests=1,
    ),
    Case(name="fp8-cache", requests=((1, 40), (0, 0), (1, 3), (20, 20), (7, 50)), cache_dtype="float8_e4m3fn"),
    Case(
        name="fp8-cache-bfloat16", requests=((1, 200), (1, 64), (33, 90)), head_dim=128, page_size=64, group=8,
        dtype="bfloat16", cache_dtype="float8_e4m3fn", num_padding_tokens=3, num_padding_requests=1,
    ),
    Case(
        name="qwen3-8b-decodes", requests=((1, 1024),) * 32, kv_heads=8, group=4, head_dim=128, page_size=32,
        dtype="bfloat16", num_layers=1,
    ),
    Case(
        name="qwen3-8b-mixed", requests=((1, 1024),) * 31 + ((481, 2048),), kv_heads=8, group=4, head_dim=128,
        page_size=32, dtype="bfloat16", num_layers=1,
    ),
    Case(
        name="qwen3-32b-tp8-long", requests=((1, 32_000),) * 4, kv_heads=1, group=8, head_dim=128, page_size=32,
        dtype="bfloat16", num_layers=1,
    ),
)  # fmt: skip


def _matrix_case(name: str, requests: tuple[tuple[int, int], ...], **shape: Any) -> Case:
    return Case(name=name, requests=requests, **{"head_dim": 128, "page_size": 64, **shape}, dtype="bfloat16")


# For kernels with tiles of about 128 query rows and blocks of about 128 keys. Too large for an interpreter.
_BORDERS = (
    (1, 63),
    (1, 64),
    (1, 65),
    (1, 127),
    (1, 128),
    (1, 129),
    (63, 63),
    (65, 65),
    (129, 129),
    (2, 129),
    (130, 257),
)
_CHUNKS = ((100, 700), (1, 33), (65, 65), (300, 300))
MATRIX_CASES = (
    _matrix_case("one-tile", ((32, 32),), group=4),
    _matrix_case("block-borders-group-1", _BORDERS, group=1),
    _matrix_case("block-borders-group-4", _BORDERS, group=4),
    _matrix_case("group-3-page-16", _CHUNKS, group=3, kv_heads=3, page_size=16),
    _matrix_case("group-5-page-48", _CHUNKS, group=5, page_size=48),
    _matrix_case("group-6-page-96", _CHUNKS, group=6, page_size=96),
    _matrix_case("group-7-page-32", _CHUNKS, group=7, kv_heads=1, page_size=32),
    _matrix_case("group-2-page-128", _CHUNKS, page_size=128),
    _matrix_case("group-8-page-256", _CHUNKS, group=8, page_size=256),
    _matrix_case("head-64-page-128", _CHUNKS, group=4, head_dim=64, page_size=128),
    _matrix_case("head-64-group-8-page-16", _CHUNKS, group=8, head_dim=64, page_size=16),
    _matrix_case(
        "empty-and-padding", ((0, 0), (1, 9), (70, 200)), group=4, num_padding_tokens=50, num_padding_requests=3
    ),
    _matrix_case("parts-of-decodes", ((1, 2047), (1, 2048), (1, 2049), (1, 5000), (1, 100)), group=4),
    _matrix_case("parts-of-chunks", ((100, 2100), (1, 3000), (33, 4129)), group=4),
    _matrix_case("parts-of-a-lone-decode", ((1, 9000),), kv_heads=1, group=8, page_size=128),
    _matrix_case("parts-head-64-page-16", ((20, 2500), (1, 6000)), group=8, head_dim=64, page_size=16),
    _matrix_case("padding-alone", (), num_padding_tokens=7, num_padding_requests=2),
    _matrix_case("more-tiles-than-blocks", ((900, 900), (1, 1500)) * 3, kv_heads=4, group=8, num_layers=1),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `WriteKV` and `PagedAttention`."""

    q: np.ndarray  # [T, K, G, H]
    k: np.ndarray  # [T, K, H]
    v: np.ndarray
    cache: np.ndarray  # [L, P, K, 2, S, H], before this step's keys and values are written
    batch: PagedBatch
    layer: int
    scale: float


def make_inputs(case: Case, seed: int) -> Inputs:
    """Returns random inputs.

    The pages of all requests are shuffled in the cache. The cache holds NaN wherever no request has a key or value: in
    pages that no request owns, after a request's last token, and where this step writes. Page table entries beyond the
    pages that a request owns point to an unowned page.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(case.dtype)
    counts = [-(-total // case.page_size) for _, total in case.requests]
    num_pages = sum(counts) + 3
    shuffled = rng.permutation(num_pages).astype(np.int32)
    unowned, owned = shuffled[0], shuffled[3:]
    table = np.full((len(counts) + case.num_padding_requests, case.pages_per_request), unowned)
    for row, pages in enumerate(np.split(owned, np.cumsum(counts)[:-1]) if counts else []):
        table[row, : len(pages)] = pages

    heads = (case.num_layers, case.kv_heads, 2, case.head_dim)
    shape = (case.num_layers, num_pages, case.kv_heads, 2, case.page_size, case.head_dim)
    cache = np.full(shape, np.nan, np.dtype(case.cache_dtype or dtype))
    positions: list[int] = []
    token_request: list[int] = []
    for row, (num_new, total) in enumerate(case.requests):
        past = np.arange(total - num_new)
        places = table[row, past // case.page_size], past % case.page_size
        cache[:, places[0], :, :, places[1]] = rng.standard_normal((len(past), *heads), np.float32)
        positions += range(total - num_new, total)
        token_request += [row] * num_new
    positions += [-1] * case.num_padding_tokens
    token_request += [0] * case.num_padding_tokens

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((len(positions), case.kv_heads, *shape, case.head_dim), np.float32).astype(dtype)

    batch = PagedBatch(jnp.array(positions, jnp.int32), jnp.array(token_request, jnp.int32), jnp.array(table))
    return Inputs(normal(case.group), normal(), normal(), cache, batch, case.num_layers - 1, case.head_dim**-0.5)


def expected_cache(inputs: Inputs) -> np.ndarray:
    """Returns the cache after this step's keys and values are written."""
    cache = inputs.cache.copy()
    positions, token_request, page_table = (np.asarray(field) for field in inputs.batch)
    for token, (position, request) in enumerate(zip(positions, token_request, strict=True)):
        if position >= 0:
            page, offset = divmod(position, cache.shape[4])
            cache[inputs.layer, page_table[request, page], :, 0, offset] = inputs.k[token]
            cache[inputs.layer, page_table[request, page], :, 1, offset] = inputs.v[token]
    return cache


def divided(cache: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Returns what each of `num_parts` devices holds of a cache whose pages they divide; see `context_split`."""
    return [cache[:, :, :, :, part::num_parts] for part in range(num_parts)]


def expected_attention(inputs: Inputs) -> np.ndarray:
    """Returns the attention [T, K, G, H], computed token by token in float64; 0 for padding."""
    pages = expected_cache(inputs)[inputs.layer]
    page_size = pages.shape[3]
    out = np.zeros(inputs.q.shape)
    positions, token_request, page_table = (np.asarray(field) for field in inputs.batch)
    for token, (position, request) in enumerate(zip(positions, token_request, strict=True)):
        if position < 0:
            continue
        seen = np.arange(position + 1)
        kv = pages[page_table[request, seen // page_size], :, :, seen % page_size].astype(np.float64)  # [N, K, 2, H]
        scores = np.einsum("kgh,nkh->kgn", inputs.q[token].astype(np.float64), kv[:, :, 0]) * inputs.scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[token] = np.einsum("kgn,nkh->kgh", weights, kv[:, :, 1])
    return out
