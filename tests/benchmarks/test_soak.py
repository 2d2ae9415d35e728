"""Soaks the demo model with every logits processor and checks that nothing leaks or compiles late."""

import json

import pytest

from meshserve.benchmarks.checks import soak
from meshserve.runtime.weights.locate import DEMO_DIRECTORY


def test_mixed_load_is_clean(capsys: pytest.CaptureFixture):
    model = DEMO_DIRECTORY
    arguments = [
        f"--model={model}", "--seconds=5", "--tp=2", "--cpu-devices=8", "--num-pages=64", "--page-size=16",
        "--max-context=256", "--max-running=8", "--max-step-tokens=32", "--controlled=0.6",
        "--set=dtype=float32", "--set=cache_dir=", "--set=draft_tokens=3", "--draft-turns=0.5",
    ]  # fmt: skip
    assert soak.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_clean"] and report["late_compiles"] == 0 and report["failure"] is None
    assert report["ended"]["length"] > 0 and report["tokens"] > 0
    assert report["pages_free_at_the_end"] == report["pages"] == 64
    assert report["tokens_per_second_with_drafts"] > 0 and len(report["ratio_of_each_pair"]) > 1
