"""Tests the CUDA kernel that prepares heads on a Hopper GPU, in a cache full of NaN."""

import jax
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.paged_attention import HeadSettings, gpu

from . import heads

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LARGE = heads.Case(128, 4, 8, 64, ((0, 3000), (100, 1096)))


@pytest.mark.parametrize("case", [*heads.CASES, LARGE], ids=str)
def test_heads_are_normalised_turned_and_written(case: heads.Case) -> None:
    inputs = heads.make_inputs(case)

    @jax.jit
    def prepare(rows, cache, batch, arrays):
        settings = HeadSettings(*arrays, inputs.settings.epsilon)
        return gpu.prepare_heads(rows, cache, batch, settings, layer=heads.LAYER)

    q, cache = prepare(inputs.rows, inputs.cache, inputs.batch, inputs.settings[:4])
    heads.check(inputs, np.asarray(q), np.asarray(cache))
