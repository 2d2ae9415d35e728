"""Tests `meshserve bench kernels` on small shapes."""

import json

import pytest

from meshserve.benchmarks.kernels import kernels

SMALL = "--batch 1 3 --context 20 33 --heads 2x2 --head-dim 16 --page-size 16 --rounds 2 --seconds 0.01".split()


def test_figures_of_every_shape(tmp_path, capsys):
    target = tmp_path / "kernels.json"
    arguments = [*SMALL, "--cache-gigabytes", "1e-6", "--dtype", "float32", "bfloat16", "--json", str(target)]
    assert kernels.main(arguments) == 0
    figures = json.loads(target.read_text())
    assert len(figures) == 8 == len(capsys.readouterr().out.splitlines())
    assert {figure["implementation"] for figure in figures} == {"reference"}
    for figure in figures:
        bound = 1e-5 if figure["shape"]["dtype"] == "float32" else 1e-2
        assert 0 < figure["error"] < bound
        assert figure["terabytes_per_second"] > 0


def test_a_named_implementation_that_cannot_run_is_said(capsys):
    assert kernels.main([*SMALL, "--implementation", "cuda"]) == 1
    assert "attention 'cuda' cannot run" in capsys.readouterr().out


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="plots are an extra")
    folder = tmp_path / "plots"
    assert kernels.main([*SMALL, "--cache-gigabytes", "1e-6", "--plots", str(folder)]) == 0
    names = ["dashboard", "latency", "memory", "speedup", "throughput"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.png" for name in names]
