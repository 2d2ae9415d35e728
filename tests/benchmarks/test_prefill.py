"""Tests `meshserve bench prefill` and the benchmark of prefill attention on small shapes."""

import json

import pytest

from meshserve.benchmarks.engine import prefill
from meshserve.benchmarks.kernels import prefill_kernels
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


def test_attention_of_a_step_and_its_work(capsys):
    arguments = "--steps 8x2 4x1/20+1x2/7 --attention reference --kv-heads 1 --group 2 --head-dim 16 --page-size 16"
    assert prefill_kernels.main([*arguments.split(), "--calls", "1", "--rounds", "1", "--seconds", "0.01"]) == 0
    assert [line.split(":")[0].split() for line in capsys.readouterr().out.splitlines()] == [
        ["reference", "8x2"],
        ["reference", "4x1/20+1x2/7"],
    ]
    requests = (prefill_kernels.Requests.parse("2x3/5"), prefill_kernels.Requests.parse("6"))
    step = prefill_kernels.Step(name="", requests=requests, kv_heads=1, group=2, head_dim=16, page_size=16)
    # The first of two new tokens attends to 4 keys, the second to 5; those of the other request to 1 to 6.
    assert step.flops == (3 * (4 + 5) + 21) * 2 * 16 * 4
    assert step.page_bytes == (3 * 5 + 6) * 16 * 4
