"""Tests that `meshserve bench` finds benchmarks by their place, without a list."""

import importlib.util
from pathlib import Path

import pytest

from meshserve.runtime.commands import cli


def test_each_module_with_a_main_is_a_benchmark():
    found = cli.benchmarks()
    assert {"baselines", "decode", "kernels", "mesh", "prefix", "scheduler", "serve", "soak"} <= set(found)
    assert not {"compare", "kernel_times", "serving_report", "traffic", "__init__"} & set(found)
    for name, (module, about) in found.items():
        assert importlib.util.find_spec(module) is not None and about, name


def test_a_new_file_is_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    (tmp_path / "load").mkdir()
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "__init__.py").write_text("")
    (tmp_path / "load" / "bursts.py").write_text(
        '"""Sends bursts.\n\nMore."""\n\n\ndef main(arguments=None):\n    ...\n'
    )
    spec = importlib.util.spec_from_loader("meshserve.benchmarks", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert cli.benchmarks() == {"bursts": ("meshserve.benchmarks.load.bursts", "Sends bursts.")}
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "bursts           Sends bursts." in capsys.readouterr().out


def test_an_unknown_benchmark_is_an_error_with_a_way_out(capsys: pytest.CaptureFixture):
    assert cli.main(["bench", "decod"]) == 2
    assert "no benchmark 'decod'; `meshserve bench --help` lists them" in capsys.readouterr().err


def test_arguments_reach_the_benchmark(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "mesh", "--help"])
    assert ended.value.code == 0 and "--only" in capsys.readouterr().out
