"""Tests the CUDA kernel that applies QK-norm and RoPE on a Hopper GPU, in a cache full of NaN."""

import jax
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.paged_attention import RopeSettings, gpu

from . import qk_norm_rope as steps

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LARGE = steps.Case(128, 4, 8, 64, ((0, 3000), (100, 1096)))


@pytest.mark.parametrize("case", [*steps.CASES, LARGE], ids=str)
def test_heads_are_normalized_rotated_and_written(case: steps.Case) -> None:
    inputs = steps.make_inputs(case)

    @jax.jit
    def prepare(rows, cache, batch, arrays):
        settings = RopeSettings(*arrays, inputs.settings.epsilon)
        return gpu.qk_norm_rope(rows, cache, batch, settings, layer=steps.LAYER)

    q, cache = prepare(inputs.rows, inputs.cache, inputs.batch, inputs.settings[:4])
    steps.check(inputs, np.asarray(q), np.asarray(cache))
