"""Tests how the comparisons start the process of an engine."""

from pathlib import Path

import pytest

from meshserve.benchmarks.baselines.engine_process import run_module

ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"


@pytest.fixture
def interpreter(tmp_path: Path) -> str:
    """Returns a command that writes its environment to its last argument, in place of an engine."""
    command = tmp_path / "interpreter"
    command.write_text('#!/bin/sh\nfor last; do :; done\n[ "$1" = -c ] || env > "$last"\n')
    command.chmod(0o755)
    return str(command)


@pytest.mark.parametrize(
    ("module", "of_user", "expected"),
    [
        ("vllm_served", {}, "uniform_random"),
        ("vllm_served", {ROUTING: "normal_routing"}, "normal_routing"),
        ("ours", {}, None),
    ],
)
def test_vllm_draws_experts_at_random_unless_the_user_says_otherwise(
    interpreter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, of_user: dict, expected: str | None
):
    monkeypatch.delenv(ROUTING, raising=False)
    for name, value in of_user.items():
        monkeypatch.setenv(name, value)
    report = tmp_path / "report"
    assert isinstance(run_module(module, interpreter, [str(report)], report, timeout=60.0), int)
    environment = dict(line.partition("=")[::2] for line in report.read_text().splitlines())
    assert environment.get(ROUTING) == expected and environment["HF_HUB_OFFLINE"] == "1"
