"""Tests what a server of 128k tokens needs: scratch memory of a step only, and a predicted first token."""

import dataclasses
from pathlib import Path

import pytest

from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.report import PlanRequest, make_report, planner_of
from meshserve.runtime.plan.tp_choice import roofline_of
from meshserve.runtime.resolve.resolved_server import PlacedServer, resolve_here
from meshserve.runtime.weights.locate import DEMO_MODEL, model_directory
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.mesh import make_mesh


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    """The demo model with YaRN, to 131,072 tokens."""
    demo = read_model(Path(model_directory(DEMO_MODEL)) / "config.json")
    rope = dataclasses.replace(demo.rope, kind="yarn", factor=4.0, original_max_positions=32_768)
    return dataclasses.replace(demo, rope=rope, max_positions=32_768)


def server(model: ModelConfig, max_context: int) -> PlacedServer:
    config = ServeConfig(
        model="demo", max_context=max_context, max_running=4, max_step_tokens=64, page_size=32, dtype="float32"
    )
    return resolve_here(config, model, make_mesh(1))


def test_the_scratch_memory_of_a_chunk_does_not_grow_with_the_context(model: ModelConfig) -> None:
    scratch = []
    for max_context in (2_048, 131_072):
        long = server(model, max_context)
        programs = long.programs(*long.abstract_params(), long.cache_shape(4200))
        analysis = programs.lower_step(long.buckets[-1]).compile().memory_analysis()
        scratch.append(analysis.temp_size_in_bytes)
    assert 0 < scratch[1] <= scratch[0] + (1 << 20), "only the page table's rows are longer"


def test_the_first_token_of_the_longest_prompt_is_predicted() -> None:
    config = ServeConfig(model="qwen3-8b", max_context=32_768, attention="reference")
    report = make_report(planner_of(PlanRequest(config=config, target="h200:1")), length=32_768, batches=(1,))
    [one, eight, longest] = report.prefill
    assert (one.num_tokens, eight.num_tokens, longest.num_tokens) == (1024, 8192, 32_768)
    assert 4 * eight.seconds < longest.seconds < 16 * eight.seconds, "attention is quadratic, the rest linear"


@pytest.mark.parametrize(
    ("num_tokens", "measured_ms"), [(1_024, 23.8), (4_096, 96.5), (30_000, 1_318.0), (131_000, 12_500.0)]
)
def test_first_tokens_are_predicted_within_ten_percent_of_those_measured(num_tokens: int, measured_ms: float) -> None:
    roofline = roofline_of(planner_of(PlanRequest(config=ServeConfig(model="qwen3-8b"), target="h200:1")))
    assert roofline is not None
    first = roofline.first_token(num_tokens, step_tokens=8192)
    assert first is not None
    assert 1e3 * first.computed_seconds == pytest.approx(measured_ms, rel=0.10)


def test_a_restored_prefix_is_predicted_within_ten_percent() -> None:
    roofline = roofline_of(planner_of(PlanRequest(config=ServeConfig(model="qwen3-8b"), target="h100:1")))
    assert roofline is not None and (first := roofline.first_token(796 * 32, step_tokens=8192)) is not None
    assert 1e3 * first.restored_seconds == pytest.approx(89.5, rel=0.10)


@pytest.mark.parametrize(
    ("model", "target"), [("qwen3-8b", "v6e:2x4"), ("qwen3-8b", "h200:2"), ("qwen3-30b-a3b", "h200:1")]
)
def test_nothing_is_predicted_from_what_was_not_measured(model: str, target: str) -> None:
    report = make_report(
        planner_of(PlanRequest(config=ServeConfig(model=model), target=target)), length=1024, batches=(1,)
    )
    assert report.prefill and not report.first_tokens
