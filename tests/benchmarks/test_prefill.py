"""Tests `meshserve bench prefill` on small shapes."""

import json

import pytest

from meshserve.benchmarks.engine import prefill
from meshserve.runtime.weights import registry


def test_linear_work_of_a_token():
    assert prefill.linear_flops(registry.named_model("qwen3-8b")) == pytest.approx(13.9e9, rel=1e-3)


def test_each_workload_is_prefilled_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(registry.ARCHITECTURES["qwen3"].sizes, "qwen3-0.6b", registry._size(1, 64, 128, 8, True))
    target = tmp_path / "prefill.json"
    arguments = "--model qwen3-0.6b --random-weights --prompts 1x5 2x9 --runs 1 --max-step-tokens 4 --page-size 16"
    assert prefill.main([*arguments.split(), "--json", str(target)]) == 0
    rows = json.loads(target.read_text())
    assert [(row["prompts"], row["tokens"]) for row in rows] == [(1, 5), (2, 9)]
    assert all(
        row["tokens_per_second"] == pytest.approx(row["prompts"] * row["tokens"] / row["ms"] * 1e3) for row in rows
    )
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_on_a_mesh_the_work_is_that_of_a_device(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.ARCHITECTURES["qwen3"].sizes, "qwen3-0.6b", registry._size(1, 64, 128, 8, True))
    target = tmp_path / "prefill.json"
    arguments = "--model qwen3-0.6b --random-weights --prompts 1x5 --runs 1 --max-step-tokens 8 --page-size 16"
    arguments += " --tp 2 --all-reduce xla"
    assert prefill.main([*arguments.split(), "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())
    work = prefill.linear_flops(registry.named_model("qwen3-0.6b")) * row["tokens"]
    assert row["tp"] == 2 and row["linear_tflops"] == pytest.approx(work / 2 / row["ms"] / 1e9)
