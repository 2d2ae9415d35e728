"""Tests `meshserve bench repeated_starts`: new processes, of which the second compiles nothing."""

import json
from pathlib import Path

import pytest

from meshserve.benchmarks.engine import repeated_starts

SMALL = [
    "--model=demo", "--cpu-devices=2", "--tp=2", "--dtype=float32", "--max-running=2", "--max-step-tokens=2",
    "--page-size=8", "--num-pages=6", "--max-context=48", "--no-logits-processors",
]  # fmt: skip


def test_the_second_start_finds_its_programs_and_faults_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = [*SMALL, f"--cache-dir={tmp_path / 'cache'}"]
    assert repeated_starts.main([*flags, "--starts=2", f"--json={tmp_path / 'out'}"]) == 0, capsys.readouterr().out
    assert "2 of 2 starts succeeded" in capsys.readouterr().out
    cold, warm = json.loads((tmp_path / "out").read_text())
    assert cold["programs"] == warm["programs"] == 2
    assert cold["compiles"] > 0 and cold["loaded"] == 0
    assert warm["cache_misses"] == 0 and warm["compiles"] == 0 and warm["loaded"] == 4
    assert cold["late_compiles"] == 0 and cold["pages"] == 6 and cold["evicted_pages"] > 0
    assert cold["tokens"] == 48 * cold["requests"]
    assert repeated_starts.main([*flags, "--num-pages=40", "--starts=1", "--fill=0.1"]) == 1
    text = capsys.readouterr().out
    assert "the cache was never full" in text and "0 of 1 starts succeeded" in text


def test_a_start_that_cannot_be_is_a_fault_with_its_reason(capsys: pytest.CaptureFixture[str]):
    assert repeated_starts.main([*SMALL, "--tp=3", "--starts=1"]) == 1
    assert "tp is 3 but cpu_devices only 2" in capsys.readouterr().out
