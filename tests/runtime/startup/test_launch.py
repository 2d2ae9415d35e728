"""From a model's files to an engine, where the files do not agree."""

import json
import threading
from pathlib import Path

from meshserve.runtime.api.config import ServeConfig
from meshserve.runtime.api.request import FinishReason, Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.startup.launch import launch
from tests import checkpoints
from tests.waiting import WAIT_SECONDS


def test_end_tokens_that_the_vocabulary_no_longer_has_are_left_out(tmp_path: Path) -> None:
    """The generation_config.json of a model whose vocabulary was cut. Penalties write down which tokens end."""
    model = checkpoints.save_checkpoint(tmp_path, num_hidden_layers=1)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 319, 320, 151645]}))
    ends: list[Output] = []
    has_ended = threading.Event()

    def deliver(outputs: list[Output]) -> None:
        ends.extend(output for output in outputs if output.finish_reason is not None)
        if ends:
            has_ended.set()

    config = ServeConfig(
        model=str(model), tp=1, cpu_devices=8, page_size=8, num_pages=16, max_running=2, max_step_tokens=8,
        max_context=32, cache_dir="",
    )  # fmt: skip
    launched = launch(config, deliver)
    assert launched.info.eos_token_ids == (5, 319)
    launched.engine.start()
    try:
        launched.engine.submit("a", (1, 2), SamplingParams(max_tokens=4, ignore_eos=False, presence_penalty=1.0))
        assert has_ended.wait(WAIT_SECONDS)
        assert launched.engine.failure is None
        assert ends[0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    finally:
        launched.engine.stop()
