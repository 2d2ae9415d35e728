"""Tests the scaling benchmark: the shapes of a shard, the comparisons, and the output."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from meshserve.benchmarks.engine import scaling
from meshserve.benchmarks.kernels import all_reduces, repeats
from meshserve.runtime.model import qwen3
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model

STEP = scaling.Step(
    model="m", tp=1, batch=1, context=8, step_ms=8.0, p10_ms=8.0, p90_ms=8.0, dispatch_ms=0.1, alone_ms=None,
    compile_seconds=1.0,
)  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-32b"])
def test_a_shard_alone_has_the_shapes_that_it_has_on_the_mesh(name: str, tp: int) -> None:
    whole = model_layout(named_model(name), tp)
    shard = scaling.shard_of(named_model(name), tp)
    alone = model_layout(shard, 1)
    assert alone.num_groups == whole.num_groups // tp
    assert (alone.group_size, alone.repeats) == (whole.group_size, 1)
    assert (alone.mlp_dim, alone.vocab_size) == (whole.mlp_dim // tp, whole.vocab_size // tp)


def test_efficiency_is_relative_to_the_smallest_tp_size_of_the_same_case() -> None:
    steps = [
        dataclasses.replace(STEP, tp=4, step_ms=2.5),
        STEP,
        dataclasses.replace(STEP, tp=2, step_ms=4.0),
        dataclasses.replace(STEP, tp=2, batch=32, step_ms=9.0),
    ]
    efficiencies = [step.efficiency for step in scaling.with_efficiency(steps)]
    assert efficiencies == [pytest.approx(0.8), 1.0, 1.0, 1.0]
    assert "collectives" not in STEP.text()
    assert "collectives  25%" in dataclasses.replace(STEP, alone_ms=6.0).text()


def test_sums_are_timed_by_size_and_written(tmp_path: Path) -> None:
    file = tmp_path / "all_reduces.json"
    options = [
        "--only-all-reduces",
        "--tp",
        "2",
        "--kilobytes",
        "4",
        "8",
        "--rounds",
        "1",
        "--steps",
        "1",
        f"--json={file}",
    ]
    assert scaling.main(options) == 0
    rows = json.loads(file.read_text())
    assert [(row["tp"], row["kilobytes"]) for row in rows] == [(2, 4.0), (2, 8.0)]
    assert all(set(row) == {"tp", "kilobytes", "psum"} for row in rows)


def test_every_sum_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "all_reduces.json"
    options = [
        "--only-all-reduces",
        "--tp",
        "2",
        "4",
        "--kilobytes",
        "1",
        "2",
        "--check-seconds",
        "0.01",
        f"--json={file}",
    ]
    assert scaling.main(options) == 0
    rows = json.loads(file.read_text())
    assert [(row["tp"], row["implementation"], row["num_wrong"]) for row in rows] == [(2, "psum", 0), (4, "psum", 0)]
    assert all(row["num_sums"] >= 2000 for row in rows)
    wrong = {"psum": lambda x: jax.lax.psum(x, "tensor").at[3].add(0.25)}
    monkeypatch.setattr(all_reduces, "implementations", lambda mesh, all_reduce: wrong)
    assert scaling.main(options) == 1
    rows = json.loads(file.read_text())
    assert all(row["num_wrong"] == row["tp"] * row["num_sums"] for row in rows)


def test_a_step_is_timed_and_traced_on_weights_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--model", "qwen3-0.6b", "--layers", "1", "--vocab", "2048", "--tp", "2", "--batch", "1", "2"]
    workload += ["--context", "16"]
    kernels = ["--attention", "reference", "--decode-layers", "off", "--rounds", "1", "--steps", "1"]
    file, traces = tmp_path / "steps.json", tmp_path / "traces"
    assert scaling.main([*workload, *kernels, f"--json={file}", f"--profile={traces}"]) == 0
    assert [(row["tp"], row["batch"]) for row in json.loads(file.read_text())] == [(2, 1), (2, 2)]
    assert len(list(traces.rglob("*.xplane.pb"))) == 1
    assert capsys.readouterr().out.count("ms in kernels") == 1


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scaling.plot([STEP, dataclasses.replace(STEP, tp=2, step_ms=5.0)], tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_steps_are_compared_with_the_first_and_among_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = ["--model", "qwen3-0.6b", "--layers", "2", "--vocab", "2048", "--tp", "2", "--batch", "1", "3"]
    workload += ["--context", "16"]
    kernels = ["--attention", "reference", "--decode-layers", "off"]
    monkeypatch.setattr(repeats, "_REPEATS", 2)
    file = tmp_path / "steps.json"
    options = [*workload, *kernels, "--check-seconds", "0.01", f"--json={file}"]
    assert scaling.main(options) == 0
    for row in json.loads(file.read_text()):
        assert row["num_steps"] >= 3 and row["num_changed"] == row["num_unlike"] == 0

    def wrong_on_one_device(x: jax.Array, p2p_all_reduce: object = None) -> jax.Array:
        return jax.lax.psum(x, "tensor") + jax.lax.axis_index("tensor").astype(x.dtype)

    monkeypatch.setattr(qwen3, "all_reduce", wrong_on_one_device)
    assert scaling.main(options) == 1
    rows = json.loads(file.read_text())
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["num_unlike"] >= 2 and row["num_changed"] > 0 for row in rows)
