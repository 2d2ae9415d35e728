"""Makes large random arrays and matrices on the device, from random bits and without a second array of their size."""

from functools import partial

import jax
import jax.numpy as jnp

from meshserve.kernels.decode_layers.cases import CaseFormat
from meshserve.kernels.linear import FP8, Matrix, QuantizedMatrix
from meshserve.kernels.linear.formats import SCALE, ZERO

_BYTES = (jnp.dtype("uint8"), FP8)
_MAGNITUDE = 2.0**-6  # typical magnitude of trained weights


@partial(jax.jit, static_argnums=(0, 1, 2))
def random_array(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> jax.Array:
    """Makes values with random signs and mantissas.

    Their magnitudes are from 2^-6 to 2^-5, about the spread of trained weights. Those of float8_e4m3fn are below 2,
    and uint8 has random bits.
    """
    key = jnp.array([seed, 1, 2, 3], jnp.uint32)
    if jnp.dtype(dtype) in _BYTES:
        _, bits = jax.lax.rng_bit_generator(key, shape, jnp.uint8)
        return bits if dtype == "uint8" else jax.lax.bitcast_convert_type(bits & jnp.uint8(0xBF), FP8)
    if dtype == "bfloat16":
        _, bits = jax.lax.rng_bit_generator(key, shape, jnp.uint16)
        return jax.lax.bitcast_convert_type((bits & 0x807F) | 0x3C80, jnp.bfloat16)
    _, bits = jax.lax.rng_bit_generator(key, shape, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits & jnp.uint32(0x807FFFFF)) | jnp.uint32(0x3C800000), jnp.float32)


def random_matrix(shape: tuple[int, ...], seed: int, form: CaseFormat | None, dtype: str = "bfloat16") -> Matrix:
    """Makes a matrix [..., rows, columns], plain or quantized, whose elements are about as large as trained weights."""
    if form is None:
        return random_array(shape, seed, dtype)
    grid = form.grid(shape)
    grids = {SCALE: jnp.full(grid, _MAGNITUDE * form.format.typical[SCALE], form.scale_dtype)}
    if form.has_zero:
        grids[ZERO] = jnp.full(grid, form.format.typical[ZERO], jnp.uint8)
    data_shape = (*shape[:-1], shape[-1] // form.format.packed)
    return QuantizedMatrix(form.format, random_array(data_shape, seed, form.format.storage.name), grids)
