"""Tests the benchmark of the host beside a simulated device, as a newcomer runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/load/host_load.py"


@pytest.mark.timeout(120)
def test_all_streams_get_a_token_for_each_step_of_the_device():
    arguments = "--streams=8 --step-ms=20 --decode-steps=2 --seconds=2 --warm-up-seconds=1".split()
    run = subprocess.run([sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    found = re.search(r"a step ([\d.]+) ms, [\d.]+ of the device's 20.0 ms", run.stdout)
    assert found, run.stdout
    assert 18.0 <= float(found[1]) <= 80.0  # never faster than the device; a busy machine may be slower
