"""Programs compiled for TPU slices that are not there: a few of what `make check-tpu` compiles."""

import importlib.util
import os

import pytest

from meshserve.benchmarks import check_tpu
from meshserve.runtime.aot import DryServer
from meshserve.runtime.capacity_compiled import program_faults

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'meshserve[tpu]' (Linux)"
)


@pytest.fixture(scope="module", autouse=True)
def no_tpu():
    """Else the compiler complains that it finds no TPU host, and refuses to run in two test processes at a time."""
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


@needs_compiler
@pytest.mark.parametrize("slice_name", ["v5e:2x4", "v6e:2x4"])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_program_compiles_in_place_with_its_kernels_and_all_reduces(slice_name, num_tokens):
    planner = check_tpu.planner("qwen3-8b", slice_name)
    server = DryServer.on(planner.target, planner.model)
    shape = planner.cache_shape(planner.plan().served_pages)
    bucket = next(bucket for bucket in planner.buckets if bucket.num_tokens == num_tokens)
    report = server.report(bucket, shape)
    assert program_faults(planner, report, server.cache_bytes(shape)) == []
    assert report.peak_bytes < planner.target.chip.hbm_bytes


@needs_compiler
def test_programs_beyond_the_memories_of_the_chip_are_refused():
    assert check_tpu.refusals("v6e:2x4") == []


@needs_compiler
def test_the_planned_cache_is_the_largest_that_compiles():
    planner = check_tpu.planner("qwen3-0.6b", "v6e:2x4", max_running=1, max_step_tokens=1)
    server, guess = DryServer.on(planner.target, planner.model), planner.plan().max_pages
    bucket = planner.buckets[-1]
    assert server.fits(bucket, planner.cache_shape(guess * 98 // 100))
    assert not server.fits(bucket, planner.cache_shape(guess * 102 // 100))
