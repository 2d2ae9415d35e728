"""Tests the CUDA kernel that applies QK-norm and RoPE on a Hopper GPU, in a cache full of NaN."""

import jax
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.paged_attention import RopeSettings
from meshserve.kernels.paged_attention.qk_norm_rope import qk_norm_rope
from meshserve.kernels.paged_attention.storage import FP8

from . import qk_norm_rope as steps

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LARGE = steps.Case(128, 4, 8, 64, ((0, 3000), (100, 1096)))


@pytest.mark.parametrize("case", [*steps.CASES, LARGE], ids=str)
def test_heads_are_normalized_rotated_and_written_also_in_fp8(case: steps.Case) -> None:
    inputs = steps.make_inputs(case)

    @jax.jit
    def prepare(rows, cache, batch, arrays):
        settings = RopeSettings(*arrays, inputs.settings.epsilon)
        return qk_norm_rope(rows, cache, batch, settings, layer=steps.LAYER)

    q, cache = prepare(inputs.rows, inputs.cache, inputs.batch, inputs.settings[:4])
    steps.check(inputs, np.asarray(q), np.asarray(cache))

    _, in_8_bits = prepare(inputs.rows, inputs.cache.astype(FP8), inputs.batch, inputs.settings[:4])
    np.testing.assert_array_equal(np.asarray(in_8_bits, np.float32), np.asarray(cache.astype(FP8), np.float32))
