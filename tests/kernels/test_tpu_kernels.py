"""Tests the TPU kernels in Pallas' interpreter on 4 devices: results, races, bounds, and detection of injected
faults.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshserve.kernels.paged_attention import cases, implementation, tpu
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
# `make test` runs these; --every-case runs all that an interpreter can finish.
QUICK = ("decodes-beside-chunks", "rows-without-tokens", "padding", "bfloat16-head-128", "fp8-cache")
EVERY = tuple(case.name for case in cases.CASES if case.num_kv_tokens <= 400)
TOLERANCE = {
    "float32": 1e-5,
    "bfloat16": 5e-3,
}  # relative to the norm; weights are rounded to 8 bits before they are multiplied with the values


def interpret(*arguments: str) -> list[dict]:
    """Returns the lines that `interpret_tpu.py` prints."""
    environment = {**os.environ, "NPROC": "16", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpret_tpu", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_each_case_is_right_on_every_device_and_without_a_race(pytestconfig):
    names = EVERY if pytestconfig.getoption("--every-case") else QUICK
    found = interpret("cases", *names)
    assert [line["case"] for line in found] == list(names)
    dtypes = {case.name: case.dtype for case in cases.CASES}
    for line in found:
        assert line["is_cache_right"] and not line["races"], line
        assert line["error"] <= TOLERANCE[dtypes[line["case"]]], line


def test_parts_of_the_keys_on_devices_that_divide_pages():
    names = ("decodes-beside-chunks", "bfloat16-mixed")
    for line in interpret("divided", *names):
        assert line["is_cache_right"] and not line["races"], line
        assert line["error"] <= {"decodes-beside-chunks": 1e-5, "bfloat16-mixed": 7e-3}[line["case"]], line


@pytest.fixture(scope="module")
def faults() -> dict[str, dict]:
    return {line["fault"]: line for line in interpret("faults")}


def test_without_a_fault_the_step_is_right(faults):
    assert faults["none"] == {"fault": "none", "is_right": True, "races": False}


def test_a_missing_wait_is_noticed(faults):
    """It shows in the result if copies complete late, and as a race if they complete early."""
    assert not faults["no_wait"]["is_right"]
    assert faults["no_wait_eager"]["races"]


def test_a_wrong_page_is_noticed(faults):
    assert not faults["wrong_page"]["is_right"]


def test_a_page_out_of_bounds_is_refused(faults):
    assert "out-of-bounds" in faults["out_of_bounds"]["raised"].lower()


def test_any_order_any_padding_and_a_page_table_that_is_split():
    """Decodes need not come first, padding need not come last, and the page table need not fit into scalar memory."""
    for line in interpret("split"):
        assert line["error"] <= TOLERANCE["float32"] and not line["races"], line


def test_shapes_that_mosaic_cannot_tile_are_named():
    tpu.check_shapes(head_dim=128, page_size=16, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="head_dim is 96; the TPU kernel supports 64 and 128"):
        tpu.check_shapes(head_dim=96, page_size=16, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="page_size is 24; .* multiples of 16 up to 256 in bfloat16"):
        tpu.check_shapes(head_dim=128, page_size=24, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="'tpu' cannot run: the backend is cpu"):
        implementation("tpu")
