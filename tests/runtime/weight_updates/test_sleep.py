"""An engine gives up its weights and its cache, and takes them back: the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from meshserve import LLM, SamplingParams
from meshserve.runtime.api.errors import ConfigError, InvalidRequestError, UnavailableFeatureError
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.weight_updates import engine_control
from meshserve.runtime.weight_updates.weight_updater import replaceable
from tests import checkpoints

pytestmark = pytest.mark.usefixtures("greedy_programs")

SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "num_pages": 64, "max_running": 4, "max_step_tokens": 16, "cache_dir": "",
    "show_progress": False, "logits_processors": False,
}  # fmt: skip
PROMPTS = checkpoints.random_prompts((3, 20), vocab_size=320)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, tp=8, **SMALL) as llm:  # more devices than KV heads: blocks are repeated
        yield llm


def generated(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_asleep_nothing_is_left_on_the_devices_and_awake_all_is_as_before(llm: LLM, model: Path):
    runner = llm._launched.engine.runner
    assert isinstance(runner, StepRunner)
    wanted = generated(llm)
    assert wanted == checkpoints.greedy(model, PROMPTS, 8)
    held = [*jax.tree.leaves(runner.params), *jax.tree.leaves(runner.state)]
    num_bytes = runner.device_bytes
    assert llm.sleep() == num_bytes
    assert all(array.is_deleted() for array in held)
    with pytest.raises(UnavailableFeatureError, match="sleeps. Call wake"):
        generated(llm)
    with pytest.raises(UnavailableFeatureError, match="sleeps already"):
        llm.sleep()
    with pytest.raises(UnavailableFeatureError, match="sleeps. Wake it first"):
        llm.update_weights(model)
    with pytest.raises(ConfigError, match="cannot change while the server sleeps"):
        llm._launched.resharder.change_tp(4)
    llm.wake()
    llm.wake()  # without effect
    assert generated(llm) == wanted


def test_memory_that_cannot_be_pinned_holds_the_weights_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Without such memory, and without so much of it."""
    wanted, control = generated(llm), llm._launched.control
    llm.sleep()
    assert control._host is not None and control._host._pinned is not None and not control._host._blocks
    llm.wake()

    def too_much(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 15 GiB of host memory")

    for name, replacement in (("host_shardings", lambda devices: None), ("jax.device_put", too_much)):
        with monkeypatch.context() as patch:
            patch.setattr(f"{engine_control.__name__}.{name}", replacement)
            llm.sleep()
        assert control._host is not None and control._host._pinned is None and control._host._blocks
        llm.wake()
        assert generated(llm) == wanted
    assert "could not be pinned" in caplog.text


def test_a_wake_without_memory_may_be_tried_again(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    wanted = generated(llm)
    llm.sleep()

    def without_room(runner: StepRunner) -> None:
        raise MemoryError("no block is large enough")

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "allocate_state", without_room)
        with pytest.raises(MemoryError, match="no block"):
            llm.wake()
    llm.wake()
    assert generated(llm) == wanted


def test_runners_of_several_models_or_processes_are_refused():
    with pytest.raises(UnavailableFeatureError, match="a draft model or of several processes cannot be replaced"):
        replaceable(object())


def test_dropped_weights_are_replaced_as_a_whole(llm: LLM, model: Path):
    wanted = generated(llm)
    llm.sleep(drop_weights=True)
    llm.wake()
    with pytest.raises(UnavailableFeatureError, match="were dropped. Call update_weights"):
        generated(llm)
    with pytest.raises(InvalidRequestError, match="the weights were dropped. Pass all of them"):
        llm.update_weights({"model.norm.weight": np.ones(48, np.float32)}, partial=True)
    llm.update_weights(load_file(model / "model.safetensors"))
    assert generated(llm) == wanted
