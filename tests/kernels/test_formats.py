"""Tests every weight format: numbers survive packing, and host and devices compute the same elements."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.linear import FORMATS, Format, QuantizedMatrix, dequantized
from meshserve.kernels.linear.formats import SCALE

from .comparing import assert_has_values


def random_parts(format: Format) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns data of every bit pattern but NaN, [32, K], and each grid with an element for a row and 16 columns."""
    rng = np.random.default_rng(len(format.name))
    data = rng.permutation(np.arange(2048) % 256).astype(np.uint8).reshape(32, 64).view(format.storage)
    if format.storage != np.uint8:
        data = np.where(np.isnan(data.astype(np.float32)), np.zeros_like(data), data)
    grid = (32, 64 * format.packed // 16)
    return data, {part: np.floor(rng.uniform(1, 16, grid)).astype(np.float32) for part in format.typical}


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
