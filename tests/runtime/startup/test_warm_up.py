"""Running every program before a server is ready."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshserve.runtime.cluster.membership import Membership
from meshserve.runtime.cluster.preflight import Cluster
from meshserve.runtime.draft.model.drafting_runner import RunnerBeside
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program import expert_tokens
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup import launch
from meshserve.runtime.startup.runner_build import _one_token, warm_up
from tests import checkpoints
from tests.runtime.draft.reference_head import ANGELSLIM

SMALL: dict[str, Any] = {
    "page_size": 8, "num_pages": 16, "max_running": 4, "max_step_tokens": 8, "max_context": 64, "cache_dir": "",
    "logits_processors": False,
}  # fmt: skip


@pytest.mark.parametrize("drafting", ["none", "model", "head"])
def test_every_program_runs_and_nothing_is_left_but_one_token(
    drafting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=5))
    options: dict[str, Any] = {"max_decode_steps": 4, "logits_processors": True}
    if drafting != "none":
        options = {"draft_tokens": 3, "draft_model": model}
    if drafting == "head":
        ANGELSLIM.save(tmp_path, checkpoints.TINY["vocab_size"])
        options["draft_model"] = str(tmp_path)
    config = ServeConfig(model=model, tp=2, **SMALL | options)
    runner, server, chains = launch.build_runner(config, *launch.open_model(model, random_weights=False))
    served = runner.served if isinstance(runner, RunnerBeside) else runner
    counts: Counter[Any] = Counter()
    proposals: list[Any] = []
    if isinstance(runner, RunnerBeside):
        propose = runner.propose
        monkeypatch.setattr(runner, "propose", lambda chain, packed: proposals.append(chain) or propose(chain, packed))
    for bucket, program in served._programs.items():

        def counted(*arguments: Any, bucket: Any = bucket, program: Any = program) -> Any:
            counts[bucket] += 1
            return program(*arguments)

        monkeypatch.setitem(served._programs, bucket, counted)
    warm_up(runner, server.buckets, chains, max_running=4)
    assert set(counts) == set(server.buckets) and min(counts.values()) >= 2
    assert set(proposals) == set(chains) and bool(chains) == (drafting != "none")
    state = jax.device_get(served.state)
    assert not np.asarray(state.page_table).any() and not np.asarray(state.cache)[:, 1:].any()
    assert not np.asarray(state.last_tokens)[1:].any()
    written = np.asarray(state.cache)[:, 0].any(axis=(0, 1, 2, 4))
    longest = max(bucket.num_steps for bucket in server.buckets)
    assert written.tolist() == [position < longest for position in range(8)]


@pytest.mark.parametrize(("platform", "num_calls"), [("cpu", 0), ("gpu", 1)])
def test_only_accelerators_are_warmed_up(
    platform: str, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(checkpoints.save_checkpoint(tmp_path, num_hidden_layers=1))
    calls: list[Any] = []
    resolve = launch.resolve_here
    monkeypatch.setattr(launch, "resolve_here", lambda *args: dataclasses.replace(resolve(*args), platform=platform))
    monkeypatch.setattr(launch, "warm_up", lambda *arguments, **_: calls.append(arguments))
    config = ServeConfig(model=model, tp=1, **SMALL)
    runner, server, chains = launch.build_runner(config, *launch.open_model(model, random_weights=False))
    assert calls == [(runner, server.buckets, chains)] * num_calls


def test_its_tokens_are_not_counted_as_those_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_tokens, "_SECONDS_BETWEEN_COPIES", 0.0)
    model = str(checkpoints.save_checkpoint(tmp_path, **checkpoints.TINY_EXPERTS | {"num_hidden_layers": 2}))
    config = ServeConfig(model=model, tp=2, **SMALL)
    runner, server, chains = launch.build_runner(config, *launch.open_model(model, random_weights=False))
    assert isinstance(runner, StepRunner) and runner.expert_tokens is not None
    warm_up(runner, server.buckets, chains, max_running=4)
    balance = runner.expert_tokens.balance()
    assert not balance.expert_tokens.any() and not balance.expert_imbalance and not balance.device_imbalance
    jax.block_until_ready(runner.run(server.buckets[0], _one_token(server.buckets[0], 4)))
    jax.block_until_ready(runner.expert_tokens._copied)
    num_chosen = checkpoints.TINY_EXPERTS["num_experts_per_tok"]
    assert runner.expert_tokens.balance().expert_tokens.sum() == 2 * num_chosen


def test_the_processes_of_a_cluster_begin_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a collective of the first would wait until the last has compiled its programs."""
    model = str(checkpoints.save_checkpoint(tmp_path, num_hidden_layers=1))
    calls: list[str] = []

    class Group:
        def meet(self, name: str, facts: dict[str, str], value: int = 0) -> int:
            calls.append(name)
            return value

    resolve = launch.resolve_here
    monkeypatch.setattr(launch, "resolve_here", lambda *args: dataclasses.replace(resolve(*args), platform="gpu"))
    monkeypatch.setattr(launch, "warm_up", lambda *arguments, **_: calls.append("warm-up"))
    cluster = Cluster(Membership(coordinator="localhost:1", num_processes=2, process_id=0), Group())
    config = ServeConfig(model=model, tp=1, **SMALL)
    launch.build_runner(config, *launch.open_model(model, random_weights=False), cluster)
    assert calls == ["programs", "compilation", "warm-up"]
