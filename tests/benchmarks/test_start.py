"""Tests `meshserve bench start`: real servers, of which the second and the one with a copied folder compile nothing."""

import dataclasses
import json
from pathlib import Path

import pytest

from meshserve.benchmarks.load import start
from meshserve.runtime.telemetry.start_timeline import StartTimeline

SMALL = [
    "cpu_devices=2", "tp=2", "dtype=float32", "max_running=2", "max_step_tokens=2", "page_size=8", "num_pages=6",
    "max_context=48", "logits_processors=false",
]  # fmt: skip


def test_later_starts_trace_nothing_and_write_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    arguments = ["--set", *SMALL, "stored_programs=on", "--tokens", "8", "--markdown", str(tmp_path / "table.md")]
    assert start.main(arguments) == 0, capfd.readouterr()
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == ["cold", "warm", "second"]
    cold, *later = lines
    assert cold["timeline"]["within"]["XLA"] > 0 and cold["changed_files"] > 0 and cold["num_loaded"] == 0
    assert [len(tokens) for tokens in cold["tokens"]] == [1, 8, 8] and cold["num_pages"] == 6
    for line in later:
        within = line["timeline"]["within"]
        assert "lowering" not in within and "XLA" not in within and within["loading programs"] > 0
        assert line["changed_files"] == 0 and line["num_loaded"] == cold["num_compiles"] > 0
    for line in lines:
        phases = line["timeline"]["phases"]
        assert sum(phases.values()) == pytest.approx(line["timeline"]["total"], abs=0.1)
        assert {"importing jax", "starting the devices", "choosing kernels", "loading the weights"} <= phases.keys()
        assert {"compiling the programs", "allocating the KV cache", "building the engine"} <= phases.keys()
        assert line["step_seconds"] > 0
        assert line["first_token_seconds"] >= line["ready_seconds"]
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("| s | cold | warm | second |\n|---|---|---|---|\n| first token | ")


def test_what_is_wrong_with_starts():
    timeline = StartTimeline(total=3.0, phases={"imports": 2.0, "rest": 1.0}, within={"XLA": 0.5})
    cold = start.Start(
        case=start.COLD, ready_seconds=3.0, first_token_seconds=3.5, cpu_seconds=4.0, step_seconds=0.0021,
        tokens=((7,), (7, 8)), num_pages=6, num_loaded=0, num_compiles=9, changed_files=9, timeline=timeline,
    )  # fmt: skip
    second = dataclasses.replace(cold, case=start.SECOND, changed_files=0, first_token_seconds=2.5)
    assert not start._problem([cold, second])
    assert "different tokens" in start._problem([cold, dataclasses.replace(second, tokens=((7,), (7, 9)))])
    assert "different numbers of pages: [6, 5]" in start._problem([cold, dataclasses.replace(second, num_pages=5)])
    assert "no stored program: second" in start._problem([cold, second], is_stored=True)
    assert not start._problem([cold, dataclasses.replace(second, num_loaded=9)], is_stored=True)
    assert "wrote to it" in start._problem([cold, dataclasses.replace(second, changed_files=1)])
    slower = dataclasses.replace(cold, first_token_seconds=5.5)
    table = start.table_of([cold, slower, cold, second])
    assert "| first token | 3.50 | 2.50 |" in table and "| of it, over threads: XLA | 0.50 | 0.50 |" in table
