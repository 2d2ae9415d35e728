"""Products with FP8 weights on an NVIDIA Hopper GPU: see ../cuda/ffi/linear.cu.

Activations are rounded to FP8 once per product, as in `xla.linear_fp8`, in one kernel with the norm or the SiLU before
it. Then cuBLASLt multiplies on the FP8 tensor cores, with the scales of each 128 columns or of each row applied to
float32 sums. What it does not take is computed by `xla.linear`, with dequantized weights; `unsupported_reason` says
which weights these are.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, cublas_lt, operands, support
from meshserve.kernels.implementation import Cost

from . import xla
from .contract import LinearImplementation, none_taken, product_operations, stored_bytes
from .formats import E4M3, FP8, Format
from .matrix import Matrix, QuantizedMatrix
from .prologue import Prologue, RMSNorm, silu_product

FORMATS: tuple[Format, ...] = (E4M3,)  # formats of the weights that are multiplied here
BLOCK_COLUMNS = 128  # that share a scale of the activations, unless the weights have one scale for each row
_ROW_MULTIPLE, _COLUMN_MULTIPLE, _TOKEN_MULTIPLE = 16, 16, 16  # for the alignment of cuBLASLt's operands
_WIDE_HEAD_TOKENS = 128  # for which an output head reads its matrix once; see ../cuda/projection/sm90/wide_head.cuh
_NARROW_HEAD_TOKENS = 64  # the same of the kernel for fewer tokens, and for scales of part of a row
_HEAD_COLUMN_MULTIPLE = 64  # columns that share an exponent, see ../cuda/common/weight_formats.cuh
_MAX_COLUMNS = 32_768  # limited by the registers of the kernel that rounds activations
# Up to these numbers of tokens and rows, cuBLASLt is faster if it is given a scale for each row and 128 columns: it
# then takes smaller tiles (docs/log/prefill.md). As measured for Qwen3's sizes (docs/log/decode.md), also with more
# rows of few columns, by its second choice from some tokens on, and with more tokens if a matrix is small.
_SPREAD_TOKENS, _SPREAD_ROWS = 128, 4096
_WIDER_SPREAD_ROWS, _WIDER_SPREAD_COLUMNS, _FIRST_CHOICE_TOKENS = 8192, 8192, 96
_LONGER_SPREAD_TOKENS, _LONGER_SPREAD_ELEMENTS = 256, 25 << 20
# With scales for 128 x 128 elements, cuBLASLt proposes tiles of 128 x 128 for few tokens. With 128 tokens, tiles of 64
# x 64 are faster where they fill the SMs once (docs/log/decode.md). Tile and cluster are values of cuBLASLt's enums.
_TILED_TOKENS, _TILED_ROWS = 128, range(2560, 4097)
_TILE, _PAIR_OF_BLOCKS = 15, 3
# With block scales, more tokens and rows than these take a sixth less time with cuBLASLt's second choice.
_MANY_TOKENS, _MANY_ROWS = 4096, 16_384
_WORKSPACE_BYTES = 32 << 20  # cuBLAS's recommendation for Hopper; also in ../cuda/projection/cublas_lt.cuh


def unsupported_reason(weight: Matrix, dtype: jnp.dtype) -> str | None:
    """Returns why a product of activations of a dtype with a matrix (or its shapes) is left to XLA, or None."""
    if not isinstance(weight, QuantizedMatrix):
        return "the weights are not quantized"
    if weight.format not in FORMATS:
        return f"{weight.format.name} weights are dequantized to the dtype of the activations"
    if dtype != jnp.bfloat16:
        return f"activations are {dtype}; bfloat16 is needed"
    rows, columns = weight.shape[-2:]
    block = weight.block
    if block != (1, columns) and (block[1] != BLOCK_COLUMNS or block[0] > BLOCK_COLUMNS):
        return f"a scale covers {block[0]} x {block[1]} elements on a device; 128 columns or a whole row are needed"
    if rows % _ROW_MULTIPLE or columns % _COLUMN_MULTIPLE or columns > _MAX_COLUMNS:
        return (
            f"{rows} rows and {columns} columns on a device; multiples of {_ROW_MULTIPLE} and {_COLUMN_MULTIPLE} and "
            f"at most {_MAX_COLUMNS} columns are needed"
        )
    return None


def linear(
    x: jax.Array,
    weight: Matrix,
    *,
    out_dtype: jnp.dtype | None = None,
    prologue: Prologue | None = None,
    residual: jax.Array | None = None,
    candidate: int | None = None,
) -> jax.Array:
    """See `Linear`.

    Args:
      candidate: which of cuBLASLt's algorithms to use, counted from the one that it estimates to be the fastest; None
        means the one that was measured to be fast.

    Raises:
      TypeError: `out_dtype` is neither bfloat16 nor float32.
      KernelBuildError: the kernels cannot be compiled or loaded.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if not isinstance(weight, QuantizedMatrix) or unsupported_reason(weight, x.dtype) is not None:
        return xla.linear(x, weight, out_dtype=out_dtype, prologue=prologue, residual=residual)
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"out_dtype is {out_dtype}; products with FP8 weights are bfloat16 or float32")
    cublas_lt.open_library()
    norm = prologue if isinstance(prologue, RMSNorm) else None
    if prologue is not None and norm is None and prologue is not silu_product:
        x, prologue = prologue(x), None
    scale = weight.scale if weight.scale.dtype == jnp.bfloat16 else weight.scale.astype(jnp.float32)
    columns, num_rows, num_tokens = weight.shape[-1], int(np.prod(weight.shape[:-1])), x.shape[0]
    padded = -(-num_tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
    has_residual = residual is not None and padded == num_tokens and residual.dtype == out_dtype
    algorithm = algorithm_for(weight, padded)
    candidate = algorithm.candidate if candidate is None else candidate
    is_spread = algorithm.is_spread
    results = (
        jax.ShapeDtypeStruct((padded, num_rows), out_dtype),
        jax.ShapeDtypeStruct((padded, columns), FP8),
        jax.ShapeDtypeStruct((columns // BLOCK_COLUMNS if is_spread else weight.scale.shape[-1], padded), jnp.float32),
        jax.ShapeDtypeStruct((_num_arranged(weight, is_spread=is_spread),), jnp.float32),
        jax.ShapeDtypeStruct((_WORKSPACE_BYTES,), jnp.uint8),
    )
    product, *_ = jax.ffi.ffi_call("meshserve_fp8_linear", results)(
        x,
        x if norm is None else norm.gain.astype(x.dtype),
        weight.data,
        scale,
        residual if has_residual else x,
        before=np.int32(1 if norm is not None else 2 if prologue is silu_product else 0),
        epsilon=np.float32(0.0 if norm is None else norm.epsilon),
        has_residual=np.int32(has_residual),
        is_spread=np.int32(is_spread),
        candidate=np.int32(candidate),
    )
    product = product[:num_tokens]
    return product if residual is None or has_residual else residual + product


class Algorithm(NamedTuple):
    """How cuBLASLt multiplies a matrix."""

    is_spread: bool = False  # whether it is given a scale for each row and 128 columns
    candidate: int = 0  # in the order of its own estimates, or a tile and a cluster as in cublas_lt.cuh


def algorithm_for(weight: QuantizedMatrix, num_tokens: int, *, num_stacked: int = 1) -> Algorithm:
    """Returns what was measured to be fast for a matrix, or for those of a stack."""
    num_rows, columns = int(np.prod(weight.shape[:-1])) // num_stacked, weight.shape[-1]
    can_spread = columns % BLOCK_COLUMNS == 0
    has_blocks = weight.block == (BLOCK_COLUMNS, BLOCK_COLUMNS)
    if has_blocks and num_tokens == _TILED_TOKENS and num_rows in _TILED_ROWS:
        return Algorithm(candidate=256 * _TILE + _PAIR_OF_BLOCKS)
    if can_spread and num_rows <= _SPREAD_ROWS:
        is_small = num_rows * columns <= _LONGER_SPREAD_ELEMENTS
        if num_tokens <= (_LONGER_SPREAD_TOKENS if is_small else _SPREAD_TOKENS):
            return Algorithm(is_spread=True)
    elif can_spread and num_rows <= _WIDER_SPREAD_ROWS and columns <= _WIDER_SPREAD_COLUMNS:
        if num_tokens <= _SPREAD_TOKENS:
            return Algorithm(is_spread=True, candidate=int(num_tokens > _FIRST_CHOICE_TOKENS))
    if weight.block[0] not in (1, BLOCK_COLUMNS):
        return Algorithm(is_spread=True)
    has_many = num_tokens > _MANY_TOKENS and num_rows > _MANY_ROWS
    return Algorithm(candidate=int(weight.block[0] == BLOCK_COLUMNS and has_many))


def _num_arranged(weight: QuantizedMatrix, *, is_spread: bool) -> int:
    """Returns the number of scales of the weights if they are rearranged for cuBLASLt."""
    if is_spread:
        return int(np.prod(weight.shape[:-1])) * (weight.shape[-1] // BLOCK_COLUMNS)
    *row_blocks, column_blocks = weight.scale.shape
    return int(np.prod(row_blocks)) * (-(-column_blocks // 4) * 4)


def output_head(x: jax.Array, weight: Matrix, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """See `Linear`. Multiplies with an FP8 matrix without rounding activations, as the fused decode layers do.

    The time is that of reading the matrix once for each 64 tokens, or for each 128 where a row has one scale. A matrix
    that is not supported is left to XLA.
    """
    is_taken = out_dtype == jnp.float32 and unsupported_head_reason(weight, x.dtype) is None
    if not isinstance(weight, QuantizedMatrix) or not is_taken:
        return xla.linear(x, weight, out_dtype=out_dtype)
    build.load()
    (num_tokens, columns), num_rows = x.shape, weight.shape[0]
    results = [jax.ShapeDtypeStruct((num_tokens, num_rows), jnp.float32)]
    if num_tokens > _NARROW_HEAD_TOKENS and weight.block == (1, columns) and columns % BLOCK_COLUMNS == 0:
        name = "meshserve_output_head_wide"
        results.append(jax.ShapeDtypeStruct((num_tokens, 2 * columns), FP8))
        groups = -(-num_tokens // _WIDE_HEAD_TOKENS)
        results.append(jax.ShapeDtypeStruct((groups, columns // BLOCK_COLUMNS, _WIDE_HEAD_TOKENS), jnp.float32))
    else:
        name = "meshserve_output_head"
        results.append(jax.ShapeDtypeStruct((operands.activation_bytes(num_tokens, columns),), jnp.uint8))
    logits, *_ = jax.ffi.ffi_call(name, results)(x, weight.data, weight.scale)
    return logits


def unsupported_head_reason(weight: Matrix, dtype: jnp.dtype) -> str | None:
    """Returns why an output head (or its shapes) is left to XLA for activations of a dtype, or None if it is not."""
    if not isinstance(weight, QuantizedMatrix) or weight.format != E4M3 or weight.data.ndim != 2:
        return "the output head is not FP8"
    (num_rows, columns), group = weight.shape, weight.block[1]
    if dtype != jnp.bfloat16:
        return f"activations are {dtype}; bfloat16 is needed"
    if num_rows % _ROW_MULTIPLE or columns % _HEAD_COLUMN_MULTIPLE:
        return (
            f"{num_rows} rows and {columns} columns on a device; multiples of {_ROW_MULTIPLE} and "
            f"{_HEAD_COLUMN_MULTIPLE} are needed"
        )
    if group != columns and (group < _HEAD_COLUMN_MULTIPLE or group & (group - 1)):
        return (
            f"a scale covers {group} columns; whole rows or a power of two from {_HEAD_COLUMN_MULTIPLE} on are needed"
        )
    return None


def cost(matrix: Matrix, num_tokens: int, dtype: jnp.dtype) -> Cost:
    """Estimates the cost, which is XLA's where the matrix is left to it."""
    if unsupported_reason(matrix, dtype) is not None:
        return xla.IMPLEMENTATION.cost(matrix, num_tokens, dtype)
    return Cost(num_bytes=stored_bytes(matrix), fp8_operations=product_operations(matrix, num_tokens))


IMPLEMENTATION = LinearImplementation(
    name="cuda_fp8",
    unsupported_device=support.no_hopper,
    unsupported_shapes=partial(none_taken, unsupported_reason),
    unavailable_reason=cublas_lt.unavailable_reason,
    automatic_on=("gpu",),
    measured_on=("h100", "h200"),
    reached=xla.IMPLEMENTATION.reached,  # by those that are left to it
    fp8_reached=0.6,  # docs/log/decode.md
    linear=linear,
    cost=cost,
    unsupported_matrix=unsupported_reason,
    has_fp8_products=True,
    note="which rounds activations to FP8 and multiplies on the FP8 tensor cores",
)
