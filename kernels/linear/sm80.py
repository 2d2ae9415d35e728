"""Products of few tokens with quantized weights on NVIDIA GPUs since Ampere: see ../cuda/projection/sm80.

Weights in 8 or 4 bits are read once and converted to bfloat16 in registers, without rounding; scales are applied to
float32 sums. Products of more tokens, and of matrices that it does not take, are `xla.linear`'s, which dequantizes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.cuda import build, support
from meshserve.kernels.implementation import Cost

from . import xla
from .contract import LinearImplementation, least_cost, none_taken
from .formats import E4M3, INT4, Format
from .matrix import Matrix, QuantizedMatrix
from .prologue import Prologue

MAX_TOKENS = 64
FORMATS: tuple[Format, ...] = (E4M3, INT4)  # formats of the weights that are multiplied here
_CHUNK_COLUMNS = {E4M3: 64, INT4: 128}  # that a warp multiplies at a time
_LEAST_GROUP = {E4M3: 64, INT4: 32}  # columns with a scale
_ROW_MULTIPLE = 16
_SCALE_DTYPES = ("float32", "bfloat16", "float16")


def unsupported_reason(weight: Matrix, dtype: jnp.dtype) -> str | None:
    """Returns why a product of activations of a dtype with a matrix (or its shapes) is left to XLA, or None."""
    if not isinstance(weight, QuantizedMatrix):
        return "the weights are not quantized"
    if weight.format not in FORMATS:
        return f"{weight.format.name} weights are dequantized to the dtype of the activations"
    if dtype != jnp.bfloat16:
        return f"activations are {dtype}; bfloat16 is needed"
    if weight.scale.dtype.name not in _SCALE_DTYPES:
        return f"scales are {weight.scale.dtype}; {', '.join(_SCALE_DTYPES)} are supported"
    (rows, columns), group = weight.shape[-2:], weight.block[1]
    chunk, least = _CHUNK_COLUMNS[weight.format], _LEAST_GROUP[weight.format]
    if rows % _ROW_MULTIPLE or columns % chunk:
        return f"{rows} rows and {columns} columns on a device; multiples of {_ROW_MULTIPLE} and {chunk} are needed"
    if group != columns and (group < least or group & (group - 1)):
        return f"a scale covers {group} columns; whole rows or a power of two from {least} on are needed"
    return None


def linear(
    x: jax.Array,
    weight: Matrix,
    *,
    out_dtype: jnp.dtype | None = None,
    prologue: Prologue | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """See `Linear`. A token's result does not depend on how many others there are, up to MAX_TOKENS.

    Raises:
      KernelBuildError: the kernels cannot be compiled or loaded.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    is_taken = x.shape[0] <= MAX_TOKENS and out_dtype in (jnp.bfloat16, jnp.float32)
    if not isinstance(weight, QuantizedMatrix) or not is_taken or unsupported_reason(weight, x.dtype) is not None:
        return xla.linear(x, weight, out_dtype=out_dtype, prologue=prologue, residual=residual)
    build.load(build.PORTABLE)
    x = x if prologue is None else prologue(x)
    has_residual = residual is not None and residual.dtype == out_dtype
    result = jax.ShapeDtypeStruct((x.shape[0], int(np.prod(weight.shape[:-1]))), out_dtype)
    product: jax.Array = jax.ffi.ffi_call("meshserve_few_token_product", result)(
        x,
        weight.data,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        residual if has_residual else x,
        has_residual=np.int32(has_residual),
    )
    return product if residual is None or has_residual else residual + product


def cost(matrix: Matrix, num_tokens: int, dtype: jnp.dtype) -> Cost:
    """Estimates the cost, which is XLA's where the matrix or the number of tokens is left to it."""
    if num_tokens > MAX_TOKENS or unsupported_reason(matrix, dtype) is not None:
        return xla.IMPLEMENTATION.cost(matrix, num_tokens, dtype)
    return least_cost(matrix, num_tokens, dtype)


IMPLEMENTATION = LinearImplementation(
    name="portable",
    automatic_on=("gpu",),
    by_name_on=(support.HOPPER,),  # whose fused layers multiply few tokens, and which would build a second library
    unsupported_device=support.no_ampere,
    unsupported_shapes=partial(none_taken, unsupported_reason),
    unavailable_reason=partial(build.unbuildable_reason, build.PORTABLE),
    linear=linear,
    cost=cost,
    unsupported_matrix=unsupported_reason,
    note=f"which reads them as they are for up to {MAX_TOKENS} tokens, and dequantizes for more",
)
