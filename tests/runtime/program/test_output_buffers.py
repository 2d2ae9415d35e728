"""Logits and hidden states stay where they are, and nothing else changes by it."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.resolve.resolved_server import resolve_here
from meshserve.runtime.startup.launch import open_model
from meshserve.runtime.startup.runner_build import compile_runner
from meshserve.sharding.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("greedy_programs")

CONFIG = ServeConfig(
    model="demo", tp=2, max_running=4, max_step_tokens=16, max_decode_steps=2, num_pages=8, dtype="float32",
    logits_processors=False, cache_dir="",
)  # fmt: skip


def make_runner(*, has_output_buffers: bool) -> StepRunner:
    model, make_params = open_model(CONFIG.model, random_weights=False)
    server = resolve_here(CONFIG, model, make_mesh(CONFIG.tp))
    kernels = dataclasses.replace(server.kernels, has_output_buffers=has_output_buffers)
    structure, params = make_params(model, server.layout, server.mesh, server.dtype)
    runner = compile_runner(dataclasses.replace(server, kernels=kernels), structure, params)
    runner.start(params)
    return runner


def addresses(runner: StepRunner) -> dict[tuple[str, int], list[int]]:
    return {
        key: [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        for key, array in runner._output_buffers.items()
    }


def run_all(runner: StepRunner) -> list[list[int]]:
    """A step of each shape and then another one: what the second samples depends on the first."""
    sampled = []
    for bucket in sorted(runner._programs, key=lambda bucket: bucket.num_tokens) * 2:
        packed = np.zeros(bucket.size, np.int32)
        packed[bucket.fields["token_ids"]] = np.arange(bucket.num_tokens) + 100
        packed[bucket.fields["positions"]] = np.arange(bucket.num_tokens)
        sampled.append(np.asarray(runner.run(bucket, packed)).ravel().tolist())
    return sampled


def test_steps_of_all_shapes_take_turns_with_what_they_keep() -> None:
    without, with_buffers = (make_runner(has_output_buffers=has_buffers) for has_buffers in (False, True))
    assert not without._output_buffers
    before = addresses(with_buffers)
    sizes = {bucket.num_tokens for bucket in without._programs}
    assert before.keys() == {("logits", min(size, 4)) for size in sizes} | {("hidden", size) for size in sizes}
    assert any(bucket.num_steps > 1 for bucket in with_buffers._programs), "these keep nothing, but take their turn"
    assert run_all(with_buffers) == run_all(without)
    assert addresses(with_buffers) == before
    assert with_buffers.device_bytes > without.device_bytes
    buffers = list(with_buffers._output_buffers.values())
    with_buffers.release()
    assert all(array.is_deleted() for array in buffers)


def test_the_programs_of_a_runner_go_with_it() -> None:
    """jax's caches hold none of them; a server that changes its TP size would keep them all."""

    def num_programs() -> int:
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    runner = make_runner(has_output_buffers=True)
    num_compiled, num_there = len(runner._programs), num_programs()
    del runner
    assert num_programs() <= num_there - num_compiled
