"""Matrices quantised to 8 or 4 bits, and what their numbers mean. See the package for the dimensions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FP8 = jnp.dtype("float8_e4m3fn")
FP8_MAX = 448.0  # the largest e4m3 number; larger ones would become NaN when converted
SYMMETRIC_ZERO = 8  # the 4-bit number that means 0 in a matrix without zero points


class QuantisedMatrix(NamedTuple):
    """A matrix [..., N, K] of 8-bit floats, or of 4-bit integers, two in a byte.

    Its elements are data * scale, or (data - zero) * scale with 4-bit data in 0..15.
    """

    data: jax.Array  # [..., N, K] float8_e4m3fn; or [..., N, K / 2] uint8: column 2j is the low half of byte j
    scale: jax.Array  # [..., N / n, K / k], of any float dtype
    zero: jax.Array | None = None  # [..., N / n, K / k] uint8, of 4-bit data; None means SYMMETRIC_ZERO

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the stored numbers: float8_e4m3fn, or int4."""
        return jnp.dtype("int4") if self.is_int4 else self.data.dtype

    @property
    def is_int4(self) -> bool:
        """Whether the data are 4-bit integers."""
        return self.data.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that this represents."""
        *rest, columns = self.data.shape
        return (*rest, 2 * columns if self.is_int4 else columns)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        rows, columns = self.shape[-2:]
        return rows // self.scale.shape[-2], columns // self.scale.shape[-1]


Matrix = jax.Array | QuantisedMatrix


def unpacked(data: jax.Array) -> jax.Array:
    """Returns 4-bit integers [..., K] as uint8 from bytes [..., K / 2]."""
    pairs = jnp.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], -1)


def dequantised(matrix: QuantisedMatrix) -> jax.Array:
    """Returns the matrix [..., N, K] in float32. FP8 elements are exact but for the rounding of one multiplication."""
    rows, columns = matrix.block
    *rest, row_blocks, column_blocks = matrix.scale.shape

    def blocks(values: jax.Array) -> jax.Array:
        return values.astype(jnp.float32).reshape(*rest, row_blocks, rows, column_blocks, columns)

    def of_blocks(values: jax.Array) -> jax.Array:
        return values.astype(jnp.float32)[..., :, None, :, None]

    if not matrix.is_int4:
        return (blocks(matrix.data) * of_blocks(matrix.scale)).reshape(matrix.shape)
    zero = jnp.float32(SYMMETRIC_ZERO) if matrix.zero is None else of_blocks(matrix.zero)
    return ((blocks(unpacked(matrix.data)) - zero) * of_blocks(matrix.scale)).reshape(matrix.shape)


def layer_of(stack: Matrix, index: Any) -> jax.Array:
    """Returns the matrices at an index of a stack's leading dimensions, in float32 if they are quantised."""
    if not isinstance(stack, QuantisedMatrix):
        return stack[index]
    zero = None if stack.zero is None else stack.zero[index]
    return dequantised(QuantisedMatrix(stack.data[index], stack.scale[index], zero))


def to_fp8(x: jax.Array) -> jax.Array:
    """Rounds to e4m3. Numbers beyond its range become the largest one of their sign."""
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)


def quantised_activations(x: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Rounds activations [T, K] to FP8 with a scale for each token and `columns` columns.

    Returns:
      The numbers [T, K] and the scales [T, K / columns] float32.
    """
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, columns)
    highest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = jnp.where(highest > 0.0, highest / FP8_MAX, 1.0)
    # Without the barrier, XLA's GPU compiler may skip the rounding where the numbers are converted back.
    numbers = jax.lax.optimization_barrier(to_fp8(groups / scale))
    return numbers.reshape(x.shape), scale[..., 0]
