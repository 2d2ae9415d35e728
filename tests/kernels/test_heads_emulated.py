"""Tests kernels/cuda/heads.cuh compiled for the host, where each of 128 CUDA threads is a host thread."""

import ctypes

import numpy as np
import pytest

from . import heads, on_host

pytestmark = on_host.needs_compiler


class Args(ctypes.Structure):
    """Mirrors the struct in heads.cuh."""

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
    folder = tmp_path_factory.mktemp("emulated")
    fewer_threads = [("kThreads = 256", "kThreads = 128")]
    return on_host.compiled(folder, "emulated", "heads.cpp", "heads.cuh", replaced=fewer_threads)


@pytest.mark.parametrize("case", heads.CASES, ids=str)
def test_heads_are_normalised_turned_and_written(library: ctypes.CDLL, case: heads.Case) -> None:
    inputs = heads.make_inputs(case)
    settings, batch = inputs.settings, inputs.batch
    num_tokens = inputs.rows.shape[0]
    q = np.full((num_tokens, case.kv_heads, case.group, case.head_dim), np.nan, inputs.rows.dtype)
    cache = np.array(inputs.cache)
    arrays = [
        np.asarray(array)
        for array in (
            inputs.rows, settings.q_norm[heads.LAYER], settings.k_norm[heads.LAYER], settings.cos, settings.sin,
            batch.positions, batch.token_request, batch.page_table,
        )
    ]  # fmt: skip
    pointers = (array.ctypes.data for array in (*arrays, q, cache[heads.LAYER]))
    numbers = (num_tokens, case.kv_heads, case.group, batch.page_table.shape[1], case.page_size, settings.epsilon)
    library.prepare_heads(case.head_dim, ctypes.byref(Args(*pointers, *numbers)))
    heads.check(inputs, q, cache)
