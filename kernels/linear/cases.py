"""Shapes, random inputs and expected results for the tests and benchmarks of the linear operation."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from .formats import (
    E4M3,
    FP8,
    FP8_MAX,
    INT4,
    MXFP4,
    NVFP4,
    SCALE,
    SYMMETRIC_ZERO,
    TENSOR_SCALE,
    ZERO,
    Format,
)
from .matrix import Matrix, QuantizedMatrix

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by the three low bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A product of `tokens` activations with a matrix of `rows` x `columns`, whose scales cover `block` elements."""

    name: str
    kind: str  # "plain", "fp8", "int4", "int4-zero" (with zero points), or another of `PACKED`
    scale_dtype: str = "float32"
    block: tuple[int, int] = (1, 1)
    tokens: int = 5
    leading: tuple[int, ...] = ()
    rows: int = 256
    columns: int = 256
    dtype: str = "float32"  # dtype of the activations


# Formats in bytes, and the dtypes of their grids.
PACKED: Mapping[str, tuple[Format, Mapping[str, str]]] = {
    "int4": (INT4, {SCALE: "bfloat16"}),
    "int4-zero": (INT4, {SCALE: "float16", ZERO: "uint8"}),
    "nvfp4": (NVFP4, {SCALE: "float8_e4m3fn", TENSOR_SCALE: "float32"}),
    "mxfp4": (MXFP4, {SCALE: "uint8"}),
}

CASES = (
    Case(name="plain", kind="plain"),
    Case(name="plain-bfloat16-stacked", kind="plain", leading=(2,), dtype="bfloat16"),
    Case(name="fp8-block", kind="fp8", block=(128, 128)),
    Case(name="fp8-block-bfloat16", kind="fp8", block=(128, 128), dtype="bfloat16", tokens=17),
    Case(name="fp8-block-cut", kind="fp8", block=(64, 16), rows=192, columns=48),
    Case(name="fp8-block-of-rows", kind="fp8", block=(32, 96), leading=(3,), rows=128, columns=96),
    Case(name="fp8-channel", kind="fp8", block=(1, 256)),
    Case(name="fp8-channel-bfloat16", kind="fp8", block=(1, 256), leading=(2,), rows=96, dtype="bfloat16"),
    Case(name="int4-32", kind="int4", block=(1, 32)),
    Case(name="int4-64-zero", kind="int4-zero", block=(1, 64)),
    Case(name="int4-128-zero-bfloat16", kind="int4-zero", block=(1, 128), leading=(2,), dtype="bfloat16"),
    Case(name="int4-cut", kind="int4", block=(1, 2), columns=38, rows=6),
    Case(name="nvfp4", kind="nvfp4", block=(1, 16)),
    Case(name="nvfp4-bfloat16", kind="nvfp4", block=(1, 16), leading=(2,), dtype="bfloat16"),
    Case(name="mxfp4", kind="mxfp4", block=(1, 32), leading=(3,), rows=96),
    Case(name="mxfp4-cut", kind="mxfp4", block=(1, 16), columns=48, rows=6),
)

# For a GPU's FP8 tensor cores: each layout of scales, row counts of shards, padding, and sums over many columns.
MATRIX_CASES = tuple(
    dataclasses.replace(case, dtype="bfloat16")
    for case in (
        Case(name="fp8-block-one-token", kind="fp8", block=(128, 128), tokens=1, columns=512),
        Case(name="fp8-block-decode", kind="fp8", block=(128, 128), tokens=128, leading=(2,), rows=384, columns=512),
        Case(name="fp8-block-decode-many-rows", kind="fp8", block=(128, 128), tokens=128, leading=(2,), rows=3072),
        Case(name="fp8-block-decode-4096-rows", kind="fp8", block=(128, 128), tokens=128, rows=4096),
        Case(name="fp8-block-256-decodes-4096-rows", kind="fp8", block=(128, 128), tokens=256, rows=4096),
        Case(name="fp8-channel-decode-many-rows", kind="fp8", block=(1, 256), tokens=128, leading=(2,), rows=3072),
        Case(name="fp8-block-padded-scales", kind="fp8", block=(128, 128), tokens=70, rows=384, columns=768),
        Case(name="fp8-block-prefill", kind="fp8", block=(128, 128), tokens=1025, rows=1024, columns=1024),
        Case(name="fp8-block-many-columns", kind="fp8", block=(128, 128), tokens=96, rows=256, columns=12_288),
        Case(
            name="fp8-block-of-small-heads", kind="fp8", block=(64, 128), tokens=65, leading=(3,), rows=320, columns=640
        ),
        Case(name="fp8-block-bfloat16-scales", kind="fp8", block=(128, 128), tokens=65, scale_dtype="bfloat16"),
        Case(name="fp8-channel-decode", kind="fp8", block=(1, 384), tokens=65, rows=272, columns=384),
        Case(
            name="fp8-channel-prefill", kind="fp8", block=(1, 2048), tokens=1025, leading=(2,), rows=512, columns=2048
        ),
        Case(name="fp8-channel-bfloat16-scales", kind="fp8", block=(1, 256), tokens=65, scale_dtype="bfloat16"),
        Case(name="fp8-channel-shard", kind="fp8", block=(1, 1216), tokens=65, columns=1216),
    )
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `Linear`."""

    x: jnp.ndarray
    weight: Matrix


def make_inputs(case: Case, seed: int) -> Inputs:
    """Returns random inputs. Scales differ by a factor of up to 16 between blocks."""
    rng = np.random.default_rng(seed)
    shape = (*case.leading, case.rows, case.columns)
    x = jnp.asarray(rng.standard_normal((case.tokens, case.columns)), case.dtype)
    if case.kind == "plain":
        return Inputs(x, jnp.asarray(rng.standard_normal(shape), case.dtype))
    grid = (*case.leading, case.rows // case.block[0], case.columns // case.block[1])
    scale = jnp.asarray(2.0 ** rng.uniform(-8, -4, grid), case.scale_dtype)
    if case.kind == "fp8":
        data = np.clip(rng.standard_normal(shape) * 100, -FP8_MAX, FP8_MAX).astype(np.float32).astype(FP8)
        return Inputs(x, QuantizedMatrix(E4M3, jnp.asarray(data), {SCALE: scale}))
    if not case.kind.startswith("int4"):
        return Inputs(x, random_groups(rng, case.kind, shape, case.block[1]))
    data = rng.integers(0, 256, (*shape[:-1], case.columns // 2), np.uint8)
    grids = {SCALE: scale}
    if case.kind == "int4-zero":
        grids[ZERO] = jnp.asarray(rng.integers(0, 16, grid, np.uint8))
    return Inputs(x, QuantizedMatrix(INT4, jnp.asarray(data), grids))


def random_groups(rng: np.random.Generator, kind: str, shape: tuple[int, ...], columns: int) -> QuantizedMatrix:
    """Returns a random matrix of one of `PACKED`, with elements of a deviation of about K^-0.5.

    Args:
      rng: Generator of the numbers.
      kind: Key of `PACKED`.
      shape: [..., N, K].
      columns: Columns of a row that share a scale.
    """
    *leading, rows, num_columns = shape
    format, dtypes = PACKED[kind]
    data = rng.integers(0, 256, (*leading, rows, num_columns // format.packed), np.uint8)
    grids = {}
    for part, dtype in dtypes.items():
        grid = (*leading, rows, num_columns // columns) if part in (SCALE, ZERO) else (*leading, 1, 1)
        typical = format.typical_grid(part, num_columns**-0.5)
        values: np.ndarray
        if part == ZERO:
            values = rng.integers(0, 16, grid)
        elif jnp.dtype(dtype) == jnp.uint8:  # exponents
            values = rng.integers(round(typical) - 1, round(typical) + 2, grid)
        else:
            values = typical * 2.0 ** rng.uniform(-1, 1, grid)
        grids[part] = jnp.asarray(values, dtype)
    return QuantizedMatrix(format, jnp.asarray(data), grids)


def exact_matrix(weight: Matrix) -> np.ndarray:
    """Returns the matrix [..., N, K] in float64, element by element as the contract describes it."""
    if not isinstance(weight, QuantizedMatrix):
        return np.asarray(weight).astype(np.float64)
    data, scale = np.asarray(weight.data), np.asarray(weight.scale).astype(np.float64)
    rows, columns = weight.block
    if weight.format == NVFP4:  # the scale is rounded to float32 once it has been multiplied
        scale = (scale * np.asarray(weight.grids[TENSOR_SCALE])).astype(np.float32).astype(np.float64)
    if weight.format == MXFP4:
        scale = 2.0 ** (scale - 127)
    scale = np.repeat(np.repeat(scale, rows, axis=-2), columns, axis=-1)
    if weight.format == E4M3:
        return data.astype(np.float64) * scale
    values = np.empty(weight.shape)
    values[..., 0::2], values[..., 1::2] = data % 16, data // 16
    if weight.format in (NVFP4, MXFP4):
        return np.where(values < 8, 1, -1) * _E2M1[values.astype(int) % 8] * scale
    if weight.zero is None:
        return (values - SYMMETRIC_ZERO) * scale
    zero = np.repeat(np.repeat(np.asarray(weight.zero).astype(np.float64), rows, axis=-2), columns, axis=-1)
    return (values - zero) * scale


def rounded_activations(x: np.ndarray, columns: int) -> np.ndarray:
    """Returns activations as FP8 checkpoints' inference code rounds them, in float64."""
    groups = x.astype(np.float32).reshape(x.shape[0], -1, columns)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(FP8_MAX)
    scale = np.where(scale > 0, scale, np.float32(1))
    numbers = np.clip(groups / scale, -FP8_MAX, FP8_MAX).astype(FP8).astype(np.float64)
    return (numbers * scale.astype(np.float64)).reshape(x.shape)


def expected(inputs: Inputs, *, is_fp8: bool = False) -> np.ndarray:
    """Returns the product in float64; with `is_fp8`, of rounded activations if the matrix is FP8."""
    x, weight = np.asarray(inputs.x).astype(np.float64), inputs.weight
    if is_fp8 and isinstance(weight, QuantizedMatrix) and weight.format == E4M3:
        x = rounded_activations(np.asarray(inputs.x), weight.block[1])
    return x @ exact_matrix(weight).reshape(-1, x.shape[1]).T
