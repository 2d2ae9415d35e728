"""Tests that multi-step decode gives the same tokens as single steps, in every sampling mode."""

import numpy as np
import pytest

from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import ON_DEVICE, Bucket
from meshserve.runtime.program.packing import PARAM_FIELDS
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.startup.launch import launch

NUM_STEPS = 3
CONFIG = ServeConfig(
    model="demo", max_running=1, max_step_tokens=1, max_decode_steps=NUM_STEPS, num_pages=8,
    dtype="float32", decode_layers="reference", prefix_cache=False, logits_processors=False, cache_dir="",
)  # fmt: skip
PARAMS = {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01}


@pytest.fixture(scope="module")
def runner() -> StepRunner:
    return launch(CONFIG, lambda outputs: None).engine.runner


def sample(
    runner: StepRunner, bucket: Bucket, mode: SamplingMode, position: int, num_steps: int = NUM_STEPS
) -> list[int]:
    """Runs one dispatch of a request, whose first token is at position 0."""
    packed = np.zeros(bucket.size, np.int32)
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    fields["token_ids"][:] = 40 if position == 0 else ON_DEVICE
    fields["positions"][:] = position
    fields["sample_position"][:] = position + 1
    fields["page_slot"][:] = 0 if position == 0 else 1  # slot 1 is unused: no new page
    fields["page"][:] = 1
    for name in PARAM_FIELDS:
        fields[name][:] = np.float32(PARAMS[name]).view(np.int32) if name in PARAMS else 7
    if mode == SamplingMode.GREEDY:
        fields["temperature"][:] = 0
    if "num_steps" in fields:
        fields["num_steps"][:] = num_steps
    return np.asarray(runner.run(bucket, packed)).ravel().tolist()


@pytest.mark.parametrize("mode", SamplingMode)
def test_several_steps_sample_what_single_ones_do(runner: StepRunner, mode: SamplingMode):
    buckets = {bucket.num_steps: bucket for bucket in runner._programs if bucket.mode == mode}
    one_by_one = [token for position in range(NUM_STEPS) for token in sample(runner, buckets[1], mode, position)]
    assert sample(runner, buckets[NUM_STEPS], mode, 0) == one_by_one
    assert len(set(one_by_one)) > 1


def test_a_request_that_needs_fewer_steps_goes_on_from_its_last_token(runner: StepRunner):
    buckets = {bucket.num_steps: bucket for bucket in runner._programs if bucket.mode == SamplingMode.TOP_P}
    one_by_one = sample(runner, buckets[NUM_STEPS], SamplingMode.TOP_P, 0)
    assert sample(runner, buckets[NUM_STEPS], SamplingMode.TOP_P, 0, num_steps=2)[:2] == one_by_one[:2]
    assert sample(runner, buckets[1], SamplingMode.TOP_P, 2) == one_by_one[2:]
