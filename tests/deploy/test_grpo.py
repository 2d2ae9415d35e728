"""The examples of GRPO run: log-probabilities of sampler and trainer agree, rewards rise, Tunix's learner works."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optax
import pytest

from meshserve import LLM
from meshserve.deploy.demo.export import load_parameters
from meshserve.deploy.demo.network import NetworkConfig, forward, token_losses
from meshserve.deploy.examples.grpo import grpo, plot
from meshserve.runtime.weights.locate import DEMO_DIRECTORY


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo", dtype="float32", max_context=64, max_running=8, max_step_tokens=16, page_size=8, num_pages=128,
        cache_dir="", show_progress=False,
    ) as llm:  # fmt: skip
        yield llm


def test_the_reward_is_a_share_of_words():
    assert grpo.reward("So she sells Sea-shells, my lord") == 5 / 7
    assert grpo.reward("\n ... ") == 0.0


def test_the_samplers_log_probabilities_are_the_trainers(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpo, "PROMPTS", grpo.PROMPTS[:2])
    parameters = {name: 1.01 * value for name, value in load_parameters(DEMO_DIRECTORY).items()}
    llm.update_weights(parameters)
    batch, mean = grpo.rollouts(llm, seed=1)
    assert batch["ids"].shape == (16, grpo.LENGTH) and batch["is_output"].sum() == 16 * grpo.TOKENS and 0 <= mean <= 1
    logprobs = -token_losses(forward(parameters, batch["ids"][:, :-1], NetworkConfig()), batch["ids"][:, 1:])
    is_output = batch["is_output"][:, 1:]
    np.testing.assert_allclose(np.asarray(logprobs)[is_output], batch["sampled"][:, 1:][is_output], atol=2e-4)
    assert np.allclose(batch["advantages"].reshape(2, 8).mean(axis=1), 0, atol=1e-6)


def test_a_few_steps_raise_the_reward(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """With a reward that is easy to raise, few prompts, and large steps."""
    monkeypatch.setattr(grpo, "PROMPTS", grpo.PROMPTS[:2])
    monkeypatch.setattr(grpo, "TOKENS", 8)
    monkeypatch.setattr(grpo, "reward", lambda text: text.count("e") / max(len(text), 1))
    monkeypatch.setattr(grpo, "OPTIMIZER", optax.adam(1e-3))
    rewards = grpo.train(llm, seed=0, num_steps=6)
    assert len(rewards) == 6 and np.mean(rewards[-2:]) > 1.3 * np.mean(rewards[:2])
    assert llm.weight_version == "seed 0, step 5"
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_the_plot_reads_what_the_examples_print(tmp_path: Path):
    file = tmp_path / "rewards.jsonl"
    file.write_text(
        '{"seed": 1, "step": 0, "reward": 0.1}\n{"seed": 1, "step": 1, "reward": 0.2}\n'
        '{"rollout": "vanilla", "seed": 1, "step": 0, "reward": 0.3, "seconds": 1.0}\n'
    )
    assert plot.read([file]) == {("plain JAX, meshserve", 1): [0.1, 0.2], ("Tunix, its own sampler", 1): [0.3]}


def test_tunixs_learner_samples_with_meshserve(
    llm: LLM, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = pytestconfig.getoption("--tunix")
    if not folder:
        pytest.skip("needs google-tunix; `make test-tunix` installs it")
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(folder).resolve())])
    with_tunix = importlib.import_module("meshserve.deploy.examples.grpo.with_tunix")
    monkeypatch.setattr(with_tunix, "PROMPTS", grpo.PROMPTS[:2])
    monkeypatch.setattr(with_tunix, "TOKENS", 8)
    versions = int(llm.weight_version) if llm.weight_version.isdecimal() else 0
    for rollout in ("vanilla", "meshserve"):
        rows = with_tunix.train(rollout, llm, seed=0, num_steps=2)
        assert len(rows) == 2 and all(0 <= row["reward"] <= 1 for row in rows)
    assert int(llm.weight_version) >= versions + 3, "the first weights, and those after each step"
