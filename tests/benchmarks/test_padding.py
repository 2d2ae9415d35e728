"""Tests the padding benchmark: every token of the simulated traffic is served, and shares are relative to the steps."""

import json
from pathlib import Path

import pytest

from meshserve.benchmarks.checks import padding


def test_the_traffic_is_served_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "padding.json"
    arguments = [
        "--requests=30", "--rate", "5", "--input-tokens=fixed:600", "--output-tokens=fixed:10",
        "--set=max_step_tokens=1024", f"--json={file}",
    ]  # fmt: skip
    assert padding.main(arguments) == 0
    (result,) = json.loads(file.read_text())
    assert result["num_tokens"] == 30 * (600 + 9)
    places = sum(int(size) * count for size, count in result["shapes"].items())
    assert places == result["num_tokens"] + result["num_padding_tokens"]
    assert sum(result["shapes"].values()) == result["num_steps"]
    assert len(result["first_token_seconds"]) == 30 and min(result["first_token_seconds"]) > 0
    assert 0 <= result["padding_seconds"] < result["seconds"] / 10
    assert "1024 tokens a step" in capsys.readouterr().out
