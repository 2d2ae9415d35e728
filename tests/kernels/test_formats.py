"""Tests every weight format: numbers survive packing, and host and devices compute the same elements."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.linear import FORMATS, Format, QuantizedMatrix, dequantized
from meshserve.kernels.linear.formats import FP4, MXFP4, NVFP4, SCALE, TENSOR_SCALE

from .comparing import assert_has_values


def random_parts(format: Format) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns data of every bit pattern but NaN, [32, K], and each grid with an element for a row and 16 columns."""
    rng = np.random.default_rng(len(format.name))
    data = rng.permutation(np.arange(2048) % 256).astype(np.uint8).reshape(32, 64).view(format.storage)
    if format.storage != np.uint8:
        data = np.where(np.isnan(data.astype(np.float32)), np.zeros_like(data), data)
    grid = (32, 64 * format.packed // 16)
    low = 110 if format == MXFP4 else 0  # exponents with a bias of 127
    return data, {part: np.floor(low + rng.uniform(1, 16, grid)).astype(np.float32) for part in format.typical}


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_survive_packing(format: Format) -> None:
    data, _ = random_parts(format)
    numbers = format.unpack(data)
    assert numbers.shape == (32, 64 * format.packed)
    assert_has_values(numbers)
    np.testing.assert_array_equal(format.pack(numbers), data)
    np.testing.assert_array_equal(format.unpack(jnp.asarray(data)), numbers)
    assert data.nbytes == format.bytes_per_weight * numbers.size


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_elements_on_the_host_are_those_on_a_device(format: Format) -> None:
    data, grids = random_parts(format)
    of_elements = {part: np.repeat(grid, 16, axis=1) for part, grid in grids.items()}
    expected = format.elements(format.unpack(data).astype(np.float32), of_elements)
    matrix = QuantizedMatrix(format, jnp.asarray(data), {part: jnp.asarray(grid) for part, grid in grids.items()})
    np.testing.assert_array_equal(jax.jit(dequantized)(matrix), expected)
    assert_has_values(expected)
    assert np.isfinite(expected).all() and np.ptp(expected) > 0
    assert (matrix.shape, matrix.block, matrix.dtype) == ((32, 64 * format.packed), (1, 16), format.dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_grid_of_larger_rectangles_is_repeated(format: Format) -> None:
    data, grids = random_parts(format)
    for part in grids.keys() - {SCALE}:
        large = {**grids, part: grids[part][::4, :1]}
        same = {**grids, part: np.broadcast_to(large[part].repeat(4, axis=0), grids[part].shape)}
        found, expected = (
            dequantized(QuantizedMatrix(format, jnp.asarray(data), jax.tree.map(jnp.asarray, each)))
            for each in (large, same)
        )
        assert_has_values(expected)
        np.testing.assert_array_equal(found, expected)


def test_formats_are_static_parts_of_a_matrix() -> None:
    """Programs are compiled again for another format, and not for a copy of the same."""
    assert len({format.name for format in FORMATS}) == len(set(FORMATS)) == len(FORMATS)
    for format in FORMATS:
        assert copy.deepcopy(format) == format and hash(copy.deepcopy(format)) == hash(format)
        matrix = QuantizedMatrix(format, jnp.zeros((4, 4), format.storage), {SCALE: jnp.ones((4, 1))})
        leaves, structure = jax.tree.flatten(matrix)
        assert len(leaves) == 2 and jax.tree.unflatten(structure, leaves).format == format


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]  # by a number's bits


def test_4_bit_floats_have_their_published_values() -> None:
    """With their signs, also that of zero; as ml_dtypes has them."""
    data = np.arange(256, dtype=np.uint8)[None]
    codes = np.stack([data % 16, data // 16], axis=-1).reshape(1, 512)
    expected = np.array(E2M1, np.float32)[codes]
    np.testing.assert_array_equal(codes.view(FP4).astype(np.float32), expected)
    for format in (NVFP4, MXFP4):
        for found in (format.unpack(data), np.asarray(jax.jit(format.unpack)(data))):
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_scales_of_mxfp4_are_powers_of_two() -> None:
    exponents = np.arange(255, dtype=np.float32)
    found = MXFP4.elements(np.ones(255, np.float32), {SCALE: exponents})
    np.testing.assert_array_equal(found, 2.0 ** (exponents.astype(np.float64) - 127))
    with np.errstate(over="ignore"):
        assert np.isinf(MXFP4.elements(np.ones(1, np.float32), {SCALE: np.float32([255])})).all()


def test_the_product_of_the_scales_of_nvfp4_is_rounded_before_it_multiplies() -> None:
    """As ModelOpt computes."""
    numbers, scale, of_tensor = np.float32(E2M1)[:, None], np.arange(1, 16, dtype=np.float32), np.float32(0.0131)
    found = NVFP4.elements(numbers, {SCALE: scale, TENSOR_SCALE: of_tensor})
    np.testing.assert_array_equal(found, numbers * (scale * of_tensor))
    assert (found != numbers * scale * of_tensor).any(), "the order of the products matters here"


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_random_data_have_the_deviation_that_is_asked_for(format: Format) -> None:
    """Of grids that hold their values: within the next power of two for MXFP4."""
    rng = np.random.default_rng(5)
    if format.storage == np.uint8:
        data = rng.integers(0, 256, (64, 64), np.uint8)
    else:
        data = rng.standard_normal((64, 64)).astype(format.storage)
    for deviation in (0.02, 1.0):
        grids = {part: np.float32([format.typical_grid(part, deviation)]) for part in format.typical}
        found = format.elements(format.unpack(data).astype(np.float32), grids).std()
        assert (0.7 if format == MXFP4 else 0.95) < found / deviation < (1.42 if format == MXFP4 else 1.05)
