"""Tests `meshserve bench weight_updates` with the demo model: all figures, and really replaced weights."""

import dataclasses
import json
from typing import Any

import pytest

from meshserve import LLM
from meshserve.benchmarks.engine import weight_updates

SMALL = [
    "--model=demo", "--cpu-devices=8", "--tp=2", "--dtype=float32", "--max-running=4", "--max-step-tokens=16",
    "--page-size=8", "--num-pages=64", "--max-context=64", "--no-logits-processors", "--cache-dir=", "--repeats=1",
    "--output-tokens=8",
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = weight_updates.main([*SMALL, *flags])
    return status, json.loads(capsys.readouterr().out)


def test_every_kind_of_update_is_timed(capsys: pytest.CaptureFixture[str]):
    status, report = run(capsys, "--forms", "hugging_face", "maxtext", "--requests=2")
    assert status == 0 and report["faults"] == []
    kinds = [(row["form"], row["place"], row["way"], row["requests"]) for row in report["updates"]]
    assert kinds == [
        ("hugging_face", "device", "beside", 0),
        ("hugging_face", "device", "beside", 2),
        ("hugging_face", "host", "beside", 0),
        ("maxtext", "device", "beside", 0),
    ]
    for row in report["updates"]:
        assert row["is_replaced"] and 0 < row["paused_seconds"] <= row["seconds"] and row["first_seconds"] > 0
    kept, dropped = report["sleep"]
    assert kept["sleep_seconds"] > 0 and kept["wake_seconds"] > 0 and "update_seconds" not in kept
    assert dropped["weights"] == "dropped" and dropped["update_seconds"] > 0
    for name in ("on_device", "from_host", "to_host", "to_pinned", "from_pinned"):
        assert report["copies"][f"{name}_seconds"] > 0


def test_an_update_that_replaces_nothing_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    update, first = LLM.update_weights, []

    def always_the_same(llm: LLM, source: Any, **options: Any) -> Any:
        first.append(source)
        return update(llm, first[0], **options)

    monkeypatch.setattr(LLM, "update_weights", always_the_same)
    status, report = run(capsys, "--forms=tunix", "--requests=0")
    assert status == 1 and not any(row["is_replaced"] for row in report["updates"])


def test_a_request_that_ends_early_is_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    generate = LLM.generate

    def cancelled(llm: LLM, prompts: Any, params: Any, **options: Any) -> Any:
        outputs = generate(llm, prompts, params, **options)
        if params is weight_updates._CHECKED:
            return outputs
        return [
            dataclasses.replace(each, outputs=[dataclasses.replace(each.outputs[0], finish_reason="cancelled")])
            for each in outputs
        ]

    monkeypatch.setattr(LLM, "generate", cancelled)
    status, report = run(capsys, "--forms=tunix", "--requests=2")
    assert status == 1 and "after 8 tokens: cancelled" in report["faults"][0]
