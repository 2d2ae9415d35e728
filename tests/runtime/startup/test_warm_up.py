"""Running every program before a server is ready."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshserve.runtime.draft_model.drafting_runner import RunnerBeside
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup import launch
from meshserve.runtime.startup.runner_build import warm_up
from tests import checkpoints
from tests.runtime.draft_head.reference_head import ANGELSLIM

SMALL: dict[str, Any] = {
    "page_size": 8, "num_pages": 16, "max_running": 4, "max_step_tokens": 16, "max_context": 64, "cache_dir": "",
}  # fmt: skip


@pytest.mark.parametrize("drafting", ["none", "model", "head"])
def test_every_program_runs_and_nothing_is_left_but_one_token(
    drafting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=5))
    options: dict[str, Any] = {"max_decode_steps": 4}
    if drafting != "none":
        options = {"draft_tokens": 3, "logits_processors": False, "draft_model": model}
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
