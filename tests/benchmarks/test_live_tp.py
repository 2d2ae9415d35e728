"""Tests the check of changes of the TP size with a real server, and what it counts as a fault."""

import json
from pathlib import Path

import pytest

from meshserve.benchmarks.checks import live_tp


def test_no_stream_is_lost_and_every_text_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    status = live_tp.main(
        ["--model=demo", "--dtype=float32", "--tp", "1", "2", "--cpu-devices=2", "--streams=2", "--prompt-tokens=4",
         "--output-tokens=12", f"--json={file}", "--set=num_pages=64", "--set=max_step_tokens=4",
         "--set=max_context=32", "--set=cache_dir="]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0, said
    report = json.loads(file.read_text())
    assert [change["tp"] for change in report["changes"]] == [2]
    assert all(change["paused_seconds"] > 0 and change["step_ms"] > 0 for change in report["changes"])
    assert report["num_ended"] >= 2 * 3 and report["num_lost"] == report["num_different"] == 0
    assert "0 lost, 0 with other tokens" in said


@pytest.mark.parametrize(
    ("dtype", "num_ended", "num_lost", "num_different", "is_well"),
    [
        ("bfloat16", 9, 0, 2, True),
        ("float32", 9, 0, 2, False),
        ("bfloat16", 9, 1, 0, False),
        ("bfloat16", 0, 0, 0, False),
    ],
)
def test_what_is_a_fault(dtype: str, num_ended: int, num_lost: int, num_different: int, is_well: bool) -> None:
    report = live_tp.Report(
        model="m", dtype=dtype, num_streams=3, output_tokens=8, num_ended=num_ended, num_lost=num_lost,
        num_different=num_different,
    )  # fmt: skip
    assert report.is_well == is_well
