"""Tests the benchmark of the experts on a small shape."""

import json

import numpy as np
import pytest

from meshserve.benchmarks.kernels import expert_kernels
from meshserve.runtime.weights import registry

SHORT = ["--rounds", "1", "--seconds", "0.01", "--dtype", "float32", "--layers", "1"]


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the benchmark's model one of 16 small experts."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
    raw = {**registry.published_config("qwen3-30b-a3b"), **sizes}
    monkeypatch.setattr(expert_kernels, "named_model", lambda _: registry.model_config(raw))


def test_figures_of_every_implementation_and_number_of_tokens(tmp_path, capsys):
    target = tmp_path / "figures.json"
    arguments = ["--tokens", "1", "40", "--backend", "xla", "reference", "--json", str(target)]
    assert expert_kernels.main([*SHORT, *arguments]) == 0
    figures = json.loads(target.read_text())
    cases = [(figure["tokens"], figure["implementation"]) for figure in figures]
    assert cases == [(1, "xla"), (1, "reference"), (40, "xla"), (40, "reference")]
    assert figures[0]["num_experts"] == 4 and all(figure["ms"] > 0 for figure in figures)
    assert figures[0]["device_tokens"] == [4]
    assert "the busiest expert has 4.00 times the mean" in capsys.readouterr().out


def test_a_skewed_router_shows_in_the_balance_of_devices(tmp_path, capsys):
    busiest = []
    for skew in ("0", "2"):
        target = tmp_path / f"{skew}.json"
        arguments = ["--tokens", "64", "--tp", "4", "--expert-parallel", "--skew", skew, "--json", str(target)]
        assert expert_kernels.main([*SHORT, *arguments]) == 0
        (figure,) = json.loads(target.read_text())
        assert sum(figure["device_tokens"]) == 64 * 4
        busiest.append(max(figure["device_tokens"]))
    assert busiest[1] > 1.5 * busiest[0]
    assert "tokens of each device: " in capsys.readouterr().out


def test_device_tokens_are_those_of_blocks_of_experts():
    chosen = np.array([[0, 1], [1, 5], [4, 9]])
    assert expert_kernels.device_tokens(chosen, 10, 4) == [3, 2, 0, 1]  # 3 experts each, the last device one


def test_a_model_without_experts_is_refused(monkeypatch):
    monkeypatch.setattr(expert_kernels, "named_model", registry.named_model)
    with pytest.raises(SystemExit, match="qwen3-8b has no experts"):
        expert_kernels.main([*SHORT, "--model", "qwen3-8b"])
