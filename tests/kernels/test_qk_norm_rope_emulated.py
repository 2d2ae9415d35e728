"""Tests qk_norm_rope.cuh compiled for the host."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from . import on_host
from . import qk_norm_rope as steps

pytestmark = on_host.needs_compiler


class Args(ctypes.Structure):
    """Mirrors the struct in qk_norm_rope.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in "rows q_gain k_gain cosines sines positions requests page_table q pages".split()
        ),
        *((name, ctypes.c_int) for name in "num_tokens kv_heads group max_pages page_size".split()),
        ("epsilon", ctypes.c_float),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compiles the kernel's source with a ptx.cuh for the host, and fewer threads."""
    fewer = [("attention/qk_norm_rope.cuh", "kThreads = 256", "kThreads = 128")]
    return on_host.compiled(tmp_path_factory.mktemp("emulated"), "qk_norm_rope.cpp", replaced=fewer)


@pytest.mark.parametrize("case", steps.CASES, ids=str)
def test_heads_are_normalized_rotated_and_written(library: ctypes.CDLL, case: steps.Case) -> None:
    inputs = steps.make_inputs(case)
    settings, batch = inputs.settings, inputs.batch
    num_tokens = inputs.rows.shape[0]
    q = np.full((num_tokens, case.kv_heads, case.group, case.head_dim), np.nan, inputs.rows.dtype)
    cache = np.array(inputs.cache)
    arrays = [
        np.asarray(array)
        for array in (
            inputs.rows, settings.q_norm[steps.LAYER], settings.k_norm[steps.LAYER], settings.cos, settings.sin,
            batch.positions, batch.token_request, batch.page_table,
        )
    ]  # fmt: skip
    pointers = [array.ctypes.data for array in (*arrays, q, cache[steps.LAYER])]
    numbers = (num_tokens, case.kv_heads, case.group, batch.page_table.shape[1], case.page_size, settings.epsilon)
    library.qk_norm_rope(case.head_dim, False, ctypes.byref(Args(*pointers, *numbers)))
    steps.check(inputs, q, cache)

    in_8_bits = np.full(cache.shape[1:], np.nan, ml_dtypes.float8_e4m3fn)
    pointers[-1] = in_8_bits.ctypes.data
    library.qk_norm_rope(case.head_dim, True, ctypes.byref(Args(*pointers, *numbers)))
    written = cache[steps.LAYER].astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(in_8_bits.view(np.uint8) & 0x7F, written.view(np.uint8) & 0x7F)
    np.testing.assert_array_equal(in_8_bits.astype(np.float32), written.astype(np.float32))
