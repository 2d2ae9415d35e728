"""Tests the check of repeated steps: equal results pass, and a wrong sum on one device is found."""

import json
from pathlib import Path

import jax
import pytest

from meshserve.benchmarks.checks import repeated_steps
from meshserve.runtime.model.layers import residual


def test_steps_are_compared_with_the_first_and_among_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeated_steps, "_REPEATS", 2)
    file = tmp_path / "steps.json"
    options = ["--model=demo", "--tp=2", "--batch", "1", "3", "--context=16", "--set=page_size=16"]
    options += ["--seconds=0.01", "--cpu-devices=8", f"--json={file}"]
    assert repeated_steps.main(options) == 0
    for row in json.loads(file.read_text()):
        assert row["num_steps"] >= 3 and row["num_changed"] == row["num_unlike"] == 0

    def wrong_on_one_device(x: jax.Array, p2p_all_reduce: object = None) -> jax.Array:
        return jax.lax.psum(x, "tensor") + jax.lax.axis_index("tensor").astype(x.dtype)

    monkeypatch.setattr(residual, "all_reduce", wrong_on_one_device)
    assert repeated_steps.main(options) == 1
    rows = json.loads(file.read_text())
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["num_unlike"] >= 2 and row["num_changed"] > 0 for row in rows)
