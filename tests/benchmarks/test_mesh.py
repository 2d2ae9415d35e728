"""Tests the table of several GPUs: its rows on each machine, their processes and limits, its figures, and a dry run."""

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshserve.benchmarks.mesh import machine as machines
from meshserve.benchmarks.mesh import mesh
from meshserve.benchmarks.mesh.machine import Machine, find_machine, virtual_machine
from meshserve.benchmarks.mesh.readers import Served, read_live_tp, read_served, read_soak, read_tests
from meshserve.benchmarks.mesh.rows import Plan
from meshserve.benchmarks.mesh.table import MS_A_TOKEN, TOKENS_PER_SECOND, Case, Line, sum_microseconds, table
from meshserve.benchmarks.mesh.tasks import NO_MULTICAST, Task, run_tasks
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS
from tests.waiting import wait_for

SUMS = [
    {"shape": {"tp": 4, "kilobytes": size}, "implementation": name, "us": time}
    for size, p2p in ((4, 3.0), (8, 4.0), (64, 11.0))
    for name, time in (("p2p", p2p), ("psum", 18.0))
]


def gpus(num_devices: int, chip: str = "h200") -> Machine:
    return Machine(num_devices=num_devices, device=CHIPS[chip].kind, chip=CHIPS[chip])


@pytest.mark.parametrize("is_dry", [False, True], ids=["gpus", "dry"])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_the_arguments_of_every_row_are_accepted(num_devices: int, is_dry: bool) -> None:
    """A wrong argument would cost a row of a day on borrowed machines."""
    machine = virtual_machine(num_devices) if is_dry else gpus(num_devices)
    rows, _ = Plan(machine=machine, check_seconds=60, vllm="" if is_dry else "/opt/python").rows()
    assert {"mesh-tests", "all-reduces", "check-steps", "check-load", "8b", "30b-a3b-ep", "live-tp"} <= {
        r.name for r in rows
    }
    assert len({row.name for row in rows}) == len(rows)
    for task in (task for row in rows for task in row.tasks):
        arguments = [*task.arguments, f"{task.result_flag}result"]
        if task.module == "pytest":
            assert all(Path(argument).is_file() for argument in arguments if argument.endswith("_gpu.py"))
            continue
        module = importlib.import_module(task.module)
        parser = getattr(module, "parser", None) or module._parser
        options = parser().parse_args(arguments)
        if task.module.endswith("full_load"):
            module.engines_from(options, "vllm_engine")
            assert all(module._workloads(options, model) for model in options.models)
        elif hasattr(module, "parse_settings"):
            module.parse_settings(options.set)


def test_rows_fit_the_memory_of_the_machine() -> None:
    rows, left_out = Plan(machine=gpus(2, "h100"), check_seconds=1).rows()
    assert "32b" in {row.name for row in rows} and "235b-a22b-fp8" in left_out
    model = named_model("qwen3-32b")
    assert gpus(2, "h100").holds(model, 2, 2.0) and not gpus(2, "h100").holds(model, 1, 4.0)


def test_a_row_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "hangs.py").write_text(
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {CHILD!r}, sys.argv[1]])\n"
        "time.sleep(999)\n"
    )
    task = Task(module="hangs", arguments=(str(pid_file),), environment={"PYTHONPATH": str(tmp_path)})
    outcome = run_tasks([task], tmp_path, "row", 3.0)
    assert outcome.problem.startswith("ran longer than 3 s") and not outcome.results
    if pid_file.is_file():  # on a slow machine the child may not have started
        pid = int(pid_file.read_text())
        wait_for(lambda: not _is_running(pid))


CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(999)"


def _is_running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_tasks_run_side_by_side_without_multicast(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(
        "import json, os, sys\n"
        "open(sys.argv[-1].partition('=')[2], 'w').write(json.dumps(dict(os.environ)))\n"
        "sys.exit(sys.argv[1] == 'fails')\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    tasks = [Task(module="writes", arguments=(word,), environment=path) for word in ("ends", "fails")]
    outcome = run_tasks(tasks, tmp_path, "row", 60.0)
    assert outcome.problem == "exit status 1, see row-2.log"
    assert [result.name for result in outcome.results] == ["row-1.json", "row-2.json"]
    environment = json.loads(outcome.results[0].read_text())
    assert environment.items() >= NO_MULTICAST.items()


def test_all_reduces_are_looked_up_by_size() -> None:
    assert sum_microseconds(SUMS, 4, 1.0) == 3.0
    assert sum_microseconds(SUMS, 4, 8.0) == 4.0
    assert sum_microseconds(SUMS, 4, 36.0) == 7.5
    assert sum_microseconds(SUMS, 4, 65.0) is None and sum_microseconds(SUMS, 2, 8.0) is None


def test_the_parts_of_a_step() -> None:
    case = Case(machine=gpus(4), model=named_model("qwen3-8b"), tp=4)
    number, kilobytes = case.all_reduces(32) or (0, 0.0)
    assert (number, kilobytes) == (73, 256.0)
    assert Case(machine=gpus(4), model=named_model("qwen3-8b"), tp=1).all_reduces(32) is None
    assert 0.7 < case.step_ms(1, 1024) < 0.9, "a quarter of 15 GB at 4.8 TB/s"
    line = Line(row="8b", workload="w", figure=MS_A_TOKEN, value=1.5, vllm=3.0, ideal=0.75, all_reduces=(73, 8.0))
    rate = Line(row="8b", workload="w", figure=TOKENS_PER_SECOND, value=9000.0, vllm=6000.0, ideal=18000.0)
    text = table([line, rate], SUMS, {"8b": 4}).splitlines()
    assert text[2] == "| w | ms a token | 1.5 | 3 | 2.00 |  | 50% | 0.29 ms | 0.46 ms |"
    assert text[3] == "| w | output tokens/s | 9,000 | 6,000 | 1.50 |  | 50% |  |  |"


def test_results_become_lines(tmp_path: Path) -> None:
    def written(name: str, value: Any) -> list[Path]:
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return [tmp_path / name]

    suite = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'
    [line] = read_tests("mesh-tests", [*written("a.xml", suite), *written("b.xml", suite)])
    assert (line.value, line.note) == (6, "of 18, 6 skipped")
    served = Served("8b", "qwen3-8b", 4, ("one", "32"), 1.0)
    case = Case(machine=gpus(4), model=named_model("qwen3-8b"), tp=4)
    titles = {"1 x 128 in, 256 out": 1.5, "32 x 1,024 in, 256 out": 2.1}
    engine = {"figures": {t: {"output tokens/s": 100.0, "ms per output token": ms} for t, ms in titles.items()}}
    lines = read_served(served, case, written("served.json", {"qwen3-8b": {"ours": engine, "vllm": engine}}))
    assert [(line.figure, line.value, line.vllm, line.aim) for line in lines] == [
        (MS_A_TOKEN, 1.5, 1.5, 1.5), (TOKENS_PER_SECOND, 100.0, 100.0, None),
        (MS_A_TOKEN, 2.1, 2.1, 2.1), (TOKENS_PER_SECOND, 100.0, 100.0, None),
    ]  # fmt: skip
    report = {"late_compiles": 0, "ended": {"length": 7}, "tokens": 1234, "is_clean": True}
    assert "7 requests, 1,234 tokens; clean: True" in read_soak(written("soak.json", report))[0].note
    changes = [{"tp": 2, "seconds": 3.0, "paused_seconds": 0.5}]
    live = {"model": "m", "dtype": "float32", "num_lost": 1, "num_ended": 9, "num_different": 0, "changes": changes}
    assert "to 2 after 3.0 s, paused 0.5 s" in read_live_tp("live-tp", written("live.json", live))[0].note


def test_all_requests_of_a_workload_run_at_once() -> None:
    """A rate at the roofline is of all of them; a server would run 256 at a time by default."""
    rows, _ = Plan(machine=gpus(4), check_seconds=1.0).rows()
    settings = {row.name: [each for each in row.tasks[0].arguments if "max_running" in each] for row in rows}
    assert settings["8b"] == settings["8b-one-gpu"] == ["--set-all=max_running=512"]
    assert settings["32b"] == settings["30b-a3b"] == []
    case = Case(machine=gpus(4), model=named_model("qwen3-8b"), tp=4)
    assert case.tokens_per_second(512, 1, 2048) == pytest.approx(512e3 / case.step_ms(512, 1025), rel=0.01)


def test_the_machine_is_found_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(text: str) -> None:
        done = subprocess.CompletedProcess([], 0, stdout=text)
        monkeypatch.setattr(machines.subprocess, "run", lambda *_, **__: done)

    said("NVIDIA H200, 9.0, 143771\nNVIDIA H200, 9.0, 143771\n")
    machine = find_machine()
    assert str(machine) == "2 x NVIDIA H200" and machine.chip is CHIPS["h200"]
    said("NVIDIA H200, 9.0, 143771\n")
    with pytest.raises(ConfigError, match=r"1 GPU.*two or more"):
        find_machine()


def test_a_dry_run_of_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cpu-devices=2", f"--output={tmp_path}", "--cache-dir="]
    assert mesh.main([*options, "--only", "all-reduces", "8b-steps"]) == 0, capsys.readouterr().err
    text = (tmp_path / "table.md").read_text()
    assert "the figures mean nothing" in text
    assert "all-reduce over 2, 4 KB, psum" in text and "steps alone, batch 2" in text
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["problems"] == {} and set(found["seconds"]) == {"all-reduces", "8b-steps"}


def test_rows_without_time_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh.main(["--cpu-devices=4", f"--output={tmp_path}", "--minutes=0"]) == 0
    assert "* not in the table: 8b: not started: no time left" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no such row; rows are mesh-tests, all-reduces"):
        mesh.main(["--cpu-devices=4", "--only", "9b"])
    assert mesh.main(["--cpu-devices=4", "--list"]) == 0
    assert "30b-a3b-ep         at most" in capsys.readouterr().out
