"""Tests the comparison with vLLM: its draws, its figures, its table, and a run with a real server."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from meshserve.benchmarks.baselines.job import Batch, Report
from meshserve.benchmarks.lib.gpu_power import Reading
from meshserve.benchmarks.lib.token_times import RunTimes
from meshserve.benchmarks.lib.workloads import fixed
from meshserve.benchmarks.load import comparison, full_load
from meshserve.benchmarks.load.comparison import Engine
from meshserve.benchmarks.load.full_load import NANO_VLLM, WORKLOADS, Workload, table
from meshserve.runtime.api.errors import ConfigError


def run_times(seconds: float, num_tokens: int) -> RunTimes:
    return RunTimes(seconds=seconds, num_tokens=num_tokens, first_seconds=[], gap_seconds=[])


def test_no_prompt_repeats_and_the_published_draw_runs_last():
    for workload in WORKLOADS["qwen3-0.6b"].values():
        batches = workload.batches()
        prompts = [tuple(work.prompt_token_ids) for batch in batches for work in batch.works]
        assert len(set(prompts)) == len(prompts)
        assert [batch.is_timed for batch in batches].count(False) == workload.num_warmups
    assert NANO_VLLM.batches()[-1].works == NANO_VLLM.draw(0)
    assert sum(work.max_tokens for work in NANO_VLLM.draw(0)) == 133_966


def test_no_prompt_of_a_workload_begins_as_one_of_another():
    workloads = [dataclasses.replace(workload, num_runs=1) for workload in WORKLOADS["qwen3-8b"].values()]
    batches = [batch for workload in workloads for batch in workload.batches()]
    begins = [tuple(work.prompt_token_ids[:16]) for batch in batches if len(batch.works) > 1 for work in batch.works]
    assert len(set(begins)) == len(begins)


def test_figures_by_hand():
    workload = Workload(title="", draw=lambda seed: [], warm_up=lambda seed: [], num_runs=3)
    runs = [run_times(seconds, 40) for seconds in (4.0, 2.0, 8.0)] + [run_times(1.0, 4)] * 3
    # Four requests of ten tokens: the prefill gives one token each, nine steps give the rest.
    assert workload.figures(runs) == {
        "output tokens/s": 10.0, "ms per output token": pytest.approx(3000 / 9), "prefill, s": 1.0,
    }  # fmt: skip


def test_the_table_has_ratios_where_vllm_has_figures():
    def result(rate: float, prefill: float) -> dict:
        figures = {"work": {"output tokens/s": rate, "prefill, s": prefill}, "the server": {"start, s": 9.0}}
        return {"version": "1", "figures": figures, "power": {"work": "1500 MHz"}}

    lines = table(
        {"m": {"vllm": result(1000, 3.0), "ours": result(1200, 2.0)}, "n": {"ours": result(5, 1.0)}},
        {"vllm": "vLLM", "ours": "meshserve"},
    ).splitlines()
    assert lines[0] == "| model | workload | figure | vLLM | meshserve | meshserve : vLLM |"
    assert lines[2] == "| m | work | output tokens/s | 1,000 | 1,200 | 1.20 |"
    assert lines[3] == "| m | work | prefill, s | 3.00 | 2.00 | 1.50 |"
    assert lines[4] == "| m | work | clock, power | 1500 MHz | 1500 MHz |  |"
    assert lines[6] == "| n | work | output tokens/s |  | 5 |  |"


def test_figures_are_medians_over_the_starts_of_engines_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    begun: list[str] = []
    seconds = {"vllm_engine": [4.0, 2.0, 8.0], "ours_served": [2.0, 1.0]}

    def run(options: object, engine: Engine, model: str, folder: Path, batches: list[Batch]) -> Report | str:
        begun.append(engine.module)
        if not seconds[engine.module]:
            return "failed"
        took = seconds[engine.module].pop(0)
        runs = [run_times(took, 40), run_times(took / 4, 4)]
        return Report(version="1", runs=runs, spans=[(0.0, took)] * 2, start_seconds=10 * took, kv_tokens=int(took))

    def draw(seed: int) -> list:
        return fixed(seed, 4, 5, 10, 99)

    monkeypatch.setitem(WORKLOADS, "demo", {"few": Workload(title="few", draw=draw, warm_up=draw, num_runs=1)})
    monkeypatch.setattr(full_load, "run", run)
    arguments = ["--models=demo", "--starts=3", "--engines", "ours", "vllm", f"--json={tmp_path / 'found.json'}"]
    assert full_load.main(arguments) == 1  # a start failed
    assert begun == ["ours_served", "vllm_engine"] * 3
    found = json.loads((tmp_path / "found.json").read_text())["demo"]
    assert found["vllm"]["figures"]["few"] == {
        "output tokens/s": 10.0, "ms per output token": pytest.approx(1000 / 3), "prefill, s": 1.0,
    }  # fmt: skip
    assert found["vllm"]["figures"]["the server"] == {"tokens that fit in the KV cache": 4, "start, s": 40.0}
    assert [start["few"]["output tokens/s"] for start in found["vllm"]["starts"]] == [10.0, 20.0, 5.0]
    assert found["ours"]["figures"]["few"]["output tokens/s"] == 30.0
    said = capsys.readouterr()
    assert "vLLM, start 3" in said.err and "meshserve, defaults, start 3: failed" in said.err
    assert "| demo | few | output tokens/s | 30 | 10 | 3.00 |" in said.out


def test_the_clock_and_power_are_medians_too():
    starts = [
        {"version": "1", "figures": {}, "power": {"few": Reading(1500.0, 1980.0, watts, 700.0)}}
        for watts in (690.0, 600.0, 650.0)
    ]
    assert str(full_load._medians(starts)["power"]["few"]) == "1500 of 1980 MHz, 650 of 700 W"
    assert full_load._medians([*starts, {**starts[0], "power": {}}])["power"] == {}


def test_a_server_and_a_missing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def draw(seed: int) -> list:
        return fixed(seed, 3, 5, 4, 99)

    monkeypatch.setitem(WORKLOADS, "demo", {"few": Workload(title="few", draw=draw, warm_up=draw, num_runs=2)})
    monkeypatch.setattr(comparison, "model_config_json", lambda model: {})
    options = {"cpu_devices": 1, "num_pages": 16, "cache_dir": "", "max_step_tokens": 8, "max_running": 4,
               "logits_processors": "false", "max_context": 64}  # fmt: skip
    arguments = [f"--set-all={name}={value}" for name, value in options.items()]
    status = full_load.main(
        ["--models", "demo", "--dtype=float32", *arguments, "--set", "page_size=16", "--engines", "vllm", "ours",
         "tuned", "http", "offline", f"--json={tmp_path / 'found.json'}", f"--markdown={tmp_path / 'table.md'}",
         f"--python-vllm={sys.executable}"]
    )  # fmt: skip
    said = capsys.readouterr()
    assert status == 1 and "demo, vLLM: not installed" in said.err
    found = json.loads((tmp_path / "found.json").read_text())["demo"]
    assert list(found) == ["ours", "tuned", "http", "offline"], said.err
    assert found["ours"]["figures"]["the server"]["tokens that fit in the KV cache"] == 16 * 32
    assert found["tuned"]["figures"]["the server"]["tokens that fit in the KV cache"] == 16 * 16
    assert all(found[engine]["figures"]["few"]["output tokens/s"] > 0 for engine in found)
    text = (tmp_path / "table.md").read_text()
    assert "meshserve bench full_load --models demo" in text and "| OpenAI's API : gRPC |" in text


def test_tuned_needs_options():
    with pytest.raises(ConfigError, match="needs --set"):
        full_load.main(["--models", "qwen3-0.6b", "--engines", "tuned"])


def test_every_engine_is_told_to_quantize():
    options = full_load._parser().parse_args(["--quantize", "fp8-block", "--set", "fp8_head=true"])
    engines = comparison.engines_from(options, "vllm_engine")
    assert engines["vllm"].settings == {"max_model_len": 4096, "quantization": "fp8"}
    assert engines["ours"].settings == {"quantize": "fp8-block"}
    assert engines["tuned"].settings == {"quantize": "fp8-block", "fp8_head": True}
    with pytest.raises(ConfigError, match="--quantize int4: vLLM does not quantize"):
        comparison.engines_from(full_load._parser().parse_args(["--quantize", "int4"]), "vllm_engine")
    only_ours = full_load._parser().parse_args(["--quantize", "int4", "--engines", "ours"])
    assert comparison.engines_from(only_ours, "vllm_engine")["ours"].settings == {"quantize": "int4"}


def test_workloads_are_named_or_written_out():
    options = full_load._parser().parse_args(["--workloads", "32", "64x512x128"])
    named, written = full_load._workloads(options, "qwen3-8b").values()
    assert named == WORKLOADS["qwen3-8b"]["32"] and written.title == "64 x 512 in, 128 out"
    works = written.draw(0)
    assert [len(works), len(works[0].prompt_token_ids), works[0].max_tokens] == [64, 512, 128]
    with pytest.raises(SystemExit):
        full_load._parser().parse_args(["--workloads", "64x512"])


def test_runs_replace_those_of_every_workload():
    options = full_load._parser().parse_args(["--runs", "1"])
    assert {workload.num_runs for workload in full_load._workloads(options, "qwen3-8b").values()} == {1}
