"""Shapes and random inputs for the tests and benchmarks of the decode layers."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.linear import E4M3, INT4, Format, Matrix, QuantizedMatrix, to_fp8
from meshserve.kernels.linear.formats import SCALE, ZERO
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.kernels.router import RouterOptions

from . import DecodeBatch, LayerSettings, LayerWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One test case. `lengths` are the requests' token counts including the current token; 0 is a padding request.

    With `has_drafts`, rows whose lengths are consecutive are tokens of one request.
    """

    name: str
    lengths: tuple[int, ...]
    num_layers: int = 2
    embed: int = 256
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 128
    mlp: int = 384
    page_size: int = 32
    num_experts: int = 0  # in place of the MLP; `mlp` is the size of one
    num_chosen: int = 2
    has_drafts: bool = False
    weights: str = ""  # how the matrices are quantized, one of FORMATS; empty: they are not
    cache_dtype: str = ""  # empty: the inputs'

    @property
    def pages_per_request(self) -> int:
        return max(1, -(-max(self.lengths) // self.page_size))

    @property
    def router(self) -> RouterOptions | None:
        return RouterOptions(num_chosen=self.num_chosen, is_normalized=True) if self.num_experts else None


CASES = (
    Case(name="one-token", lengths=(1,)),
    Case(name="page-borders", lengths=(31, 32, 33, 64, 65), page_size=32),
    Case(name="padding-rows", lengths=(0, 17, 0, 100), page_size=16),
    Case(name="group-1", lengths=(5, 40, 129), group=1),
    Case(name="group-4-ring-wraps", lengths=(700, 3, 1500), group=4, page_size=64),
    Case(name="group-5", lengths=(33, 250), group=5, kv_heads=1, page_size=128),
    Case(name="group-8", lengths=(16, 15, 300), group=8, page_size=16),
    Case(name="head-64", lengths=(1, 16, 17, 513), head_dim=64, page_size=16, kv_heads=3, group=2),
    Case(name="head-64-group-7", lengths=(64, 200), head_dim=64, group=7, kv_heads=2),
    Case(name="qwen3-0.6b-layer", lengths=(1, 33, 512, 140), embed=1024, kv_heads=8, mlp=3072, page_size=64),
    Case(name="batch-9", lengths=tuple(range(20, 29))),
    Case(name="batch-16", lengths=tuple(range(1, 161, 10))),
    Case(name="batch-30", lengths=tuple(range(30, 60)), group=4, embed=512),
    Case(name="batch-64", lengths=tuple(range(64)), embed=512, mlp=512),
    Case(name="batch-50-odd-tiles", lengths=tuple(range(100, 150)), embed=384, mlp=320, kv_heads=3, group=3),
    Case(name="batch-128", lengths=tuple(range(1, 257, 2)), embed=512, mlp=1024),
    Case(name="batch-200", lengths=tuple(range(200)), embed=512, mlp=512),
    Case(name="uneven-lengths", lengths=(17_000, 3, 257, 4_097, 0, 9_000), group=4),
    Case(name="batch-40-uneven", lengths=(*range(100, 119), 9_000, *range(119, 139)), group=4),
    Case(name="drafts", lengths=(30, 31, 32, 33, 34, 0, 2, 17, 18, 100), has_drafts=True),
    Case(
        name="drafts-of-one-request",
        lengths=tuple(range(1020, 1028)),
        group=4,
        kv_heads=8,
        page_size=64,
        has_drafts=True,
    ),
    Case(name="drafts-of-long-requests", lengths=(*range(9_000, 9_008), *range(1, 9), 300), group=4, has_drafts=True),
    Case(
        name="drafts-of-35-requests",
        lengths=tuple(length + draft for length in range(57, 302, 7) for draft in range(4)),
        group=8,
        page_size=64,
        has_drafts=True,
    ),
    Case(name="qwen3-8b-layer", lengths=(1024,) * 3 + (77,), embed=4096, kv_heads=8, group=4, mlp=12288, page_size=64),
)


@dataclasses.dataclass(frozen=True)
class CaseFormat:
    """How the matrices of a case are quantized."""

    format: Format
    block: tuple[int, int]  # rows and columns that share a scale; 0 columns: all of a row
    scale_dtype: str
    has_zero: bool = False  # the matrices have zero points

    def grid(self, shape: tuple[int, ...], row_unit: int = 0) -> tuple[int, ...]:
        """Returns the shape of a matrix's scales. A block that divides neither it nor `row_unit` rows is smaller."""
        rows = math.gcd(self.block[0], shape[-2], row_unit)
        return (*shape[:-2], shape[-2] // rows, shape[-1] // math.gcd(self.block[1], shape[-1]))


FORMATS = {
    "fp8-block": CaseFormat(E4M3, (128, 128), "float32"),
    "fp8-block-64": CaseFormat(E4M3, (64, 64), "bfloat16"),
    "fp8-channel": CaseFormat(E4M3, (1, 0), "float32"),
    "int4-128": CaseFormat(INT4, (1, 128), "bfloat16"),
    "int4-64-zero": CaseFormat(INT4, (1, 64), "float16", has_zero=True),
    "int4-32": CaseFormat(INT4, (1, 32), "bfloat16"),
}


def _shard(name: str, num_tokens: int, *, embed: int, kv_heads: int, group: int = 2, mlp: int) -> Case:
    return Case(
        name=f"{name}-{num_tokens}",
        lengths=tuple(range(7, 7 + num_tokens)),
        num_layers=1,
        embed=embed,
        kv_heads=kv_heads,
        group=group,
        mlp=mlp,
        page_size=64,
    )


# Layers of Qwen3's sizes on one device of 1 to 8, for kernels whose splits and tails depend on the shapes.
SHARDS = (
    _shard("0.6b-tp2", 1, embed=1024, kv_heads=4, mlp=1536),
    _shard("0.6b-tp8", 20, embed=1024, kv_heads=1, mlp=384),
    _shard("1.7b", 2, embed=2048, kv_heads=8, mlp=6144),
    _shard("4b-tp8", 8, embed=2560, kv_heads=1, group=4, mlp=1216),
    _shard("4b-tp4", 64, embed=2560, kv_heads=2, group=4, mlp=2432),
    _shard("8b-tp2", 32, embed=4096, kv_heads=4, group=4, mlp=6144),
    _shard("8b-tp8", 12, embed=4096, kv_heads=1, group=4, mlp=1536),
    _shard("14b-tp4", 3, embed=5120, kv_heads=2, group=5, mlp=4352),
    _shard("32b-tp8", 16, embed=5120, kv_heads=1, group=8, mlp=3200),
    _shard("32b-tp4", 40, embed=5120, kv_heads=2, group=8, mlp=6400),
)


def quantized_cases() -> list[Case]:
    """Returns cases with quantized weights: every format on small shapes, most shards with FP8 and 4-bit weights."""
    small = ("page-borders", "head-64-group-7", "batch-16", "batch-30", "batch-50-odd-tiles", "batch-64")
    found = [(case, kind) for case in CASES if case.name in (*small, "qwen3-0.6b-layer") for kind in FORMATS]
    found += [(case, "fp8-block") for case in CASES if case.name == "batch-128"]
    found += [(case, kind) for case in SHARDS for kind in ("fp8-block", "int4-128")]
    return [dataclasses.replace(case, name=f"{case.name}-{kind}", weights=kind) for case, kind in found]


def fp8_cache_cases() -> list[Case]:
    """Returns cases with a KV cache in 8 bits, also with quantized weights."""
    cases = {case.name: case for case in (*CASES, *EXPERT_CASES, *quantized_cases())}
    names = (
        "page-borders",
        "head-64-group-7",
        "batch-64",
        "group-4-ring-wraps",
        "experts-padding",
        "batch-16-fp8-block",
        "drafts-of-one-request",
        "qwen3-0.6b-layer-fp8-block",
    )
    found = [*(cases[name] for name in names), cases["batch-30-int4-128"]]
    # Tiles of 32 tokens in clusters of blocks, and with the short rings of more than 528 pairs of request and KV head.
    lengths = (700, 3, 1500, 31, 32, 33, 0, 260)
    found.append(dataclasses.replace(cases["group-4-ring-wraps"], name="batch-8-ring-wraps", lengths=lengths))
    found.append(dataclasses.replace(cases["batch-128"], name="batch-128-8-heads", kv_heads=8))
    return [dataclasses.replace(case, name=f"{case.name}-fp8-cache", cache_dtype="float8_e4m3fn") for case in found]


EXPERT_CASES = (
    Case(name="experts-one-token", lengths=(70,), num_experts=16, mlp=96),
    Case(name="experts-padding", lengths=(0, 17, 0, 100, 33), num_experts=8, num_chosen=3),
    Case(name="experts-batch-13", lengths=tuple(range(20, 33)), num_experts=32, num_chosen=4),
    Case(name="experts-batch-40", lengths=tuple(range(60, 100)), embed=512, num_experts=24, num_chosen=8, mlp=64),
    Case(
        name="qwen3-30b-a3b-layer", lengths=(1024, 5, 300), embed=2048, kv_heads=4, group=8, mlp=768, page_size=64,
        num_experts=32, num_chosen=8,
    ),
    Case(name="experts-batch-100", lengths=tuple(range(30, 130)), num_experts=16, num_chosen=4, mlp=64),
    *(
        Case(
            name=f"experts-fp8-{batch}", lengths=tuple(range(40, 40 + batch)), embed=512, num_experts=16, num_chosen=4,
            mlp=256, weights="fp8-block",
        )
        for batch in (1, 6, 20, 60, 90, 200)
    ),
    *(
        Case(
            name=name, lengths=(0, *range(20, 147)), embed=2048, kv_heads=4, group=8, num_experts=64, num_chosen=4,
            mlp=256, weights=weights,
        )
        for name, weights in (("experts-128-tokens", ""), ("experts-fp8-128-tokens", "fp8-block"))
    ),
    Case(
        name="experts-fp8-cache", lengths=tuple(range(40, 70)), embed=512, num_experts=16, num_chosen=4, mlp=256,
        weights="fp8-block", cache_dtype="float8_e4m3fn",
    ),
    Case(
        name="experts-fp8-cache-100", lengths=(*range(40, 139), 0), embed=512, num_experts=16, num_chosen=4, mlp=256,
        weights="fp8-block", cache_dtype="float8_e4m3fn",
    ),
    Case(
        name="experts-fp8-wide", lengths=(70, 0, 3), embed=2048, num_experts=12, num_chosen=4, mlp=128,
        weights="fp8-block",
    ),
    Case(
        name="experts-fp8-wide-one", lengths=(70,), embed=2048, kv_heads=4, group=8, num_experts=32, num_chosen=8,
        mlp=768, weights="fp8-block",
    ),
    Case(
        name="experts-wide-one", lengths=(70,), embed=2048, kv_heads=4, group=8, num_experts=32, num_chosen=8, mlp=192,
    ),
    Case(name="experts-wide", lengths=(70, 0, 3, 9, 12), embed=4096, num_experts=6, mlp=96),
)  # fmt: skip


# The sharded dimension of each array on a mesh. Arrays not listed are replicated.
CUT_DIMENSIONS = {"qkv": 1, "o": 2, "gate_up": 2, "down": 2, "cache": 2}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `DecodeKernels.decode_layers`."""

    x: jax.Array
    weights: LayerWeights
    cache: jax.Array
    batch: DecodeBatch
    inverse_frequencies: jax.Array
    settings: LayerSettings


def page_table(case: Case, rng: np.random.Generator, num_pages: int) -> np.ndarray:
    """Returns each request's pages in random order. Unneeded entries hold valid page numbers as well."""
    shuffled = rng.permutation(num_pages)[: len(case.lengths) * case.pages_per_request]
    table = shuffled.reshape(len(case.lengths), case.pages_per_request).astype(np.int32)
    for row in range(1, len(table)):
        if case.has_drafts and case.lengths[row] == case.lengths[row - 1] + 1 > 1:
            table[row] = table[row - 1]
    return table


def make_inputs(case: Case, seed: int, dtype: jnp.dtype) -> Inputs:
    """Returns random inputs.

    The cache holds NaN wherever no request has a token, including pages that no request owns and the slots of the
    current tokens, which the step must write before it reads them.
    """
    rng = np.random.default_rng(seed)
    num_layers, embed, mlp = case.num_layers, case.embed, case.mlp
    q_columns = case.kv_heads * case.group * case.head_dim

    def plain(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5, dtype)

    def matrix(*shape: int, row_unit: int = 128) -> Matrix:
        return quantized_matrix(rng, case.weights, shape, row_unit) if case.weights else plain(*shape)

    def gain(*shape: int) -> jax.Array:
        return jnp.asarray(1 + 0.2 * rng.standard_normal(shape, np.float32), dtype)

    experts = (case.num_experts,) if case.num_experts else ()
    weights = LayerWeights(
        input_norm=gain(num_layers, embed),
        qkv=matrix(num_layers, case.kv_heads, (case.group + 2) * case.head_dim, embed, row_unit=case.head_dim),
        q_norm=gain(num_layers, case.head_dim),
        k_norm=gain(num_layers, case.head_dim),
        o=matrix(num_layers, embed, q_columns),
        post_norm=gain(num_layers, embed),
        gate_up=matrix(num_layers, *experts, 2, mlp, embed),
        down=matrix(num_layers, *experts, embed, mlp),
        router=plain(num_layers, *experts, embed) if experts else None,
    )
    num_pages = len(case.lengths) * case.pages_per_request + 3
    table = page_table(case, rng, num_pages)
    shape = (num_layers, num_pages, case.kv_heads, 2, case.page_size, case.head_dim)
    cache = np.full(shape, np.nan, np.float32)
    for row, length in enumerate(case.lengths):
        for position in range(length - 1):  # the last one is written by this step
            page = table[row, position // case.page_size]
            cache[:, page, :, :, position % case.page_size] = rng.standard_normal(
                (num_layers, case.kv_heads, 2, case.head_dim), np.float32
            )
    for row, length in enumerate(case.lengths):  # and so is that of an earlier row of the same request
        cache[:, table[row, (length - 1) // case.page_size], :, :, (length - 1) % case.page_size] = np.nan
    return Inputs(
        x=jnp.asarray(3 * rng.standard_normal((len(case.lengths), embed), np.float32), dtype),
        weights=weights,
        cache=jnp.asarray(cache, case.cache_dtype or dtype),
        batch=DecodeBatch(positions=jnp.asarray(np.array(case.lengths, np.int32) - 1), page_table=jnp.asarray(table)),
        inverse_frequencies=jnp.asarray(1e6 ** (-np.arange(0, case.head_dim, 2) / case.head_dim), jnp.float32),
        settings=LayerSettings(
            epsilon=1e-6,
            softmax_scale=case.head_dim**-0.5,
            rotary_scale=1.0,
            router=case.router,
            has_drafts=case.has_drafts,
        ),
    )


def prompt_batch(case: Case, inputs: Inputs, num_new: Sequence[int], num_padding: int = 3) -> PagedBatch:
    """Returns a step with the last `num_new` tokens of each request, for `DecodeKernels.prompt_layers`.

    The cache of `inputs` has the tokens before them, and all but the last of them, which the step writes again.
    """
    lengths = np.array(case.lengths)
    positions = [np.arange(length - new, length) for length, new in zip(lengths, num_new, strict=True)]
    token_request = np.repeat(np.arange(len(lengths)), num_new)
    return PagedBatch(
        jnp.asarray(np.concatenate([*positions, [-1] * num_padding]), jnp.int32),
        jnp.asarray(np.concatenate([token_request, [0] * num_padding]), jnp.int32),
        inputs.batch.page_table,
    )


def quantized_matrix(rng: np.random.Generator, kind: str, shape: tuple[int, ...], row_unit: int) -> QuantizedMatrix:
    """Returns a random matrix in one of FORMATS, with elements of the usual size. Scales differ by a factor of up to 4.

    Rectangles that do not divide the shape, or `row_unit` rows, are smaller by a power of two.
    """
    quantized = FORMATS[kind]
    grid, format = quantized.grid(shape, row_unit), quantized.format
    deviation = 100.0 if format == E4M3 else 1.0 / format.typical[SCALE]  # standard deviation of the numbers
    scale = jnp.asarray(2.0 ** rng.uniform(-1, 1, grid) * shape[-1] ** -0.5 / deviation, quantized.scale_dtype)
    if format == E4M3:
        data = to_fp8(jnp.asarray(rng.standard_normal(shape, np.float32) * deviation))
        return QuantizedMatrix(format, data, {SCALE: scale})
    grids = {SCALE: scale}
    if quantized.has_zero:
        grids[ZERO] = jnp.asarray(rng.integers(5, 12, grid, np.uint8))
    return QuantizedMatrix(format, jnp.asarray(rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)), grids)
