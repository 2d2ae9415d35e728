"""Tests the kernel that finds the sampling threshold on a Hopper GPU, against sorting and in the sampler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshserve.kernels.cuda import build
from meshserve.kernels.sampling import cuda
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.program.sampling import SamplingBatch, sample
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

from .comparing import assert_has_values
from .thresholds import FILTERS, keeps_the_right_tokens, parameters, rows

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [151_936, 50_257])
def test_a_row_keeps_what_its_filters_keep(vocab: int, filters: dict[str, float]) -> None:
    logits = rows(22, vocab)
    find = jax.jit(cuda.find_threshold)
    thresholds = np.asarray(find(logits, **parameters(22, **filters)))
    assert_has_values(logits)
    for index, (row, threshold) in enumerate(zip(logits, thresholds, strict=True)):
        assert keeps_the_right_tokens(row, threshold, **filters), f"row {index}"
    again = np.asarray(find(np.concatenate([logits[::-1]] * 8), **parameters(8 * 22, **filters)))
    np.testing.assert_array_equal(again[:22][::-1], thresholds)  # independent of the other rows
    assert (again.reshape(8, 22) == again[:22]).all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_samples_are_those_of_xlas_search(filters: dict[str, float]) -> None:
    """Checks both the compiled-in mode and the mode chosen on the device.

    Rounding may add or remove a row's least likely token.
    """
    num, vocab = 64, 151_936
    values = parameters(num, **filters)
    seeds = np.arange(num, dtype=np.uint32)
    params = SamplingBatch(**values, seed_low=seeds, seed_high=seeds, position=np.zeros(num, np.int32))
    logits = 3 * jax.random.normal(jax.random.key(3), (num, vocab), jnp.float32)
    mode = SamplingMode.FILTERED

    def tokens(mode: SamplingMode | np.ndarray, find_threshold: object) -> np.ndarray:
        choose = partial(sample, vocab_size=vocab, is_unrolled=True, find_threshold=find_threshold)
        whole = PartitionSpec()
        specs = {"in_specs": (PartitionSpec(None, TENSOR_AXIS), whole), "out_specs": whole, "check_vma": False}
        program = jax.shard_map(lambda logits, params: choose(logits, params, mode), mesh=make_mesh(1), **specs)
        return np.asarray(jax.jit(program)(logits, params))

    expected = tokens(mode, None)
    assert_has_values(expected)
    assert (tokens(mode, cuda.find_threshold) == expected).sum() >= num - 1
    assert (tokens(jnp.int32(mode), cuda.find_threshold) == expected).sum() >= num - 1
    assert (tokens(jnp.int32(SamplingMode.GREEDY), cuda.find_threshold) == np.asarray(logits.argmax(axis=1))).all()
