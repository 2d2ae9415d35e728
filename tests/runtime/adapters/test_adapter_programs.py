"""Tests that steps without adapters run the programs of a server without any, and the others multiply by few slots."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshserve import LLM
from meshserve.runtime.adapters import bank
from meshserve.runtime.adapters.bank import AdapterShape
from meshserve.runtime.adapters.changes import AdapterChanges
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.cluster.replay import from_message, to_message
from meshserve.runtime.engine.runner import AdapterCalls
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import ANY_MODE, BatchBuilder, Bucket
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.resolve.buckets import adapter_buckets, declare_buckets
from meshserve.runtime.resolve.resolved_server import PlacedServer, resolve_for, resolve_here
from meshserve.runtime.scheduler.step_plan import ScheduledChunk, StepPlan
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS
from meshserve.sharding.mesh import make_mesh
from tests.runtime.adapters.test_adapter_parity import KINDS, SMALL, build, expected, generated
from tests.runtime.backend.test_products import DENSE
from tests.runtime.program.test_batch import no_processors
from tests.runtime.scheduler.test_adapter_slots import request
from tests.waiting import wait_for

CONFIG = ServeConfig(
    model="random", decode_layers="reference", dtype="float32", max_running=4, max_step_tokens=8, num_pages=8,
    max_context=32, page_size=8, max_decode_steps=2,
)  # fmt: skip
ADAPTERS = {"max_adapters": 3, "max_adapter_rank": 4}


def lowered(server: PlacedServer, bucket: Bucket) -> str:
    structure, params = server.abstract_params()
    return server.programs(structure, params, server.cache_shape(8)).lower_step(bucket).as_text()


def test_steps_without_adapters_have_the_programs_of_a_server_without_any() -> None:
    """The same text is compiled for the same limits, fused layers included, so that nothing can be lost."""
    without, found = (resolve_here(dataclasses.replace(CONFIG, **more), DENSE, make_mesh(1)) for more in ({}, ADAPTERS))
    assert found.limits == without.limits and found.step_limits == without.step_limits
    assert found.kernel_names == without.kernel_names and found.max_fused_tokens == without.max_fused_tokens > 0
    plain = [bucket for bucket in found.buckets if not bucket.num_adapters]
    assert tuple(plain) == without.buckets and any(bucket.is_decode for bucket in plain)
    for bucket in plain:
        if bucket.mode in (ANY_MODE, SamplingMode.GREEDY):
            assert lowered(found, bucket) == lowered(without, bucket), bucket
    adapted = [bucket for bucket in found.buckets if bucket.num_adapters]
    assert {(bucket.num_adapters, bucket.num_steps) for bucket in adapted} == {(1, 1), (3, 1), (1, 2), (3, 2)}
    texts = {lowered(found, bucket) for bucket in adapted if bucket.num_tokens == 8}
    assert len(texts) == 2 and not texts & {lowered(found, bucket) for bucket in plain if bucket.num_tokens == 8}


@pytest.mark.parametrize(("model", "chip", "tp"), [("qwen3-8b", "h200", 1), ("qwen3-8b", "v6e", 4)])
def test_a_server_of_an_accelerator_compiles_few_more(model: str, chip: str, tp: int) -> None:
    servers = [
        resolve_for(ServeConfig(model=model, **more), named_model(model), chip=CHIPS[chip], num_devices=tp)
        for more in ({}, {"max_adapters": 8}, {"max_adapters": 32, "max_adapter_rank": 64})
    ]
    plain, few, wide = (server.buckets for server in servers)
    assert few[: len(plain)] == wide[: len(plain)] == plain
    assert len(plain) < len(few) < len(wide) < 2.5 * len(plain)
    assert len({bucket.key for bucket in wide}) == len(wide)
    # The last one is the largest in every respect: the cache is sized by the memory that it needs.
    assert few[-1] == Bucket(*dataclasses.astuple(plain[-1])[:3], num_adapters=8)
    large = [bucket.num_adapters for bucket in few if bucket.num_adapters and bucket.num_tokens > 64]
    assert set(large) == {8} and {bucket.num_adapters for bucket in wide if bucket.num_tokens > 64} == {0, 1, 32}


def plans(numbers: Sequence[int], num_tokens: int, num_steps: int) -> Iterator[StepPlan]:
    """Yields decodes, and the same number of tokens with a prompt among them; -1 is a request without an adapter."""
    requests = [request(number, index) for index, number in enumerate(numbers)]
    for slot, each in enumerate(requests):
        each.slot = slot
    lengths = [1] * len(requests) if num_steps > 1 else ()
    yield StepPlan(
        decodes=requests, starts=[1] * len(requests), prefills=(), num_steps=num_steps, decode_lengths=lengths
    )
    if num_steps == 1:
        chunk = ScheduledChunk(requests[0], 0, num_tokens - len(requests) + 1, True)
        yield StepPlan(decodes=requests[1:], starts=[1] * (len(requests) - 1), prefills=[chunk])


@pytest.mark.parametrize("kernels", [{}, {"max_fused_tokens": 16}, {"max_fused_tokens": 16, "has_drafts": True}])
@pytest.mark.parametrize("multi_step_requests", [0, 16])
def test_every_mix_of_adapters_has_a_bucket(kernels: dict[str, Any], multi_step_requests: int) -> None:
    sizes = {"max_running": 24, "page_size": 8}
    buckets = declare_buckets(max_step_tokens=200, max_decode_steps=4, **sizes, **kernels)
    if most := multi_step_requests:
        buckets = tuple(bucket for bucket in buckets if bucket.num_steps == 1 or bucket.num_requests <= most)
    buckets += adapter_buckets(buckets, AdapterShape(4, 64))
    builder = BatchBuilder(buckets, **sizes, max_request_pages=4, processors=no_processors(24))
    mixes = ([-1, -1], [0], [-1, 2, 2], [0, 1], [3, -1, 2, 1, 0], [-1] * 24, [1] * 24, [0, 1, 2, 3, -1, -1] * 4)
    for numbers in mixes:
        num_adapters = len({number for number in numbers if number >= 0})
        for num_tokens in (len(numbers), 61, 130, 200):
            for num_steps in (1, 4) if len(numbers) <= (multi_step_requests or 24) else (1,):
                for plan in plans(numbers, num_tokens, num_steps):
                    assert plan.num_adapters == num_adapters
                    for mode in SamplingMode:
                        bucket = builder.bucket(plan, mode)
                        assert bucket.num_adapters == (num_adapters if num_adapters < 2 else 4)
                        assert bucket.num_tokens >= plan.num_batch_tokens and bucket.num_steps == num_steps
                    drafter = dataclasses.replace(plan, is_of_drafter=True)
                    assert not builder.bucket(drafter, SamplingMode.RANDOM).num_adapters


@pytest.mark.usefixtures("greedy_programs")
def test_fused_layers_beside_adapters(tmp_path: Path) -> None:
    """Requests without adapters run on fused layers until one with an adapter comes, and again when it has left."""
    base, paths = build(tmp_path, KINDS[:2])
    tokens = expected(tmp_path, base, paths)
    used: list[Bucket] = []
    options = {**SMALL, "prefix_cache": False, "decode_layers": "reference"}
    with LLM(base, adapters=paths, max_adapters=4, **options) as llm:
        engine, run = llm._launched.engine, llm._launched.engine.runner.run
        names: list[str | None] = []

        def run_behind_all(bucket: Bucket, packed: Any) -> Any:
            wait_for(lambda: used or engine.load().num_running + engine.load().num_waiting == len(names))
            used.append(bucket)
            return run(bucket, packed)

        engine.runner.run = run_behind_all
        for names, count in (
            ([None] * 3, 0), (["adapter-0", None, "adapter-0"], 1), (["adapter-1"], 1), ([None], 0),
            ([None, "adapter-0", "adapter-1"], 4),
        ):  # fmt: skip
            used.clear()
            assert generated(llm, names) == [tokens[name][index] for index, name in enumerate(names)]
            found = {bucket.num_adapters for bucket in used}
            assert max(found) == count and all(bucket.num_adapters == 0 for bucket in used if bucket.is_decode)
            assert any(bucket.is_decode for bucket in used) or count
            assert count != 1 or found == {1}, "its first request has an adapter, and ends last"


def test_other_processes_get_the_same_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent in parts and joined, they are what one process writes, in each slot of its own."""
    monkeypatch.setattr(bank, "PART_BYTES", 1000)
    base, paths = build(tmp_path, KINDS[:2])
    with LLM(base, tp=2, adapters=paths, max_adapters=2, **SMALL) as llm:
        runner, catalog = llm._launched.engine.runner, llm._launched.engine.adapters
        assert isinstance(runner, AdapterCalls) and isinstance(runner, StepRunner) and runner._adapters is not None
        changes = AdapterChanges([(1, catalog.find("adapter-0")), (0, catalog.find("adapter-1"))], {2: 0, 5: 1})
        runner.change_adapters(changes)
        written = [np.asarray(leaf) for leaf in runner._adapters.leaves]
        runner._adapters.allocate()
        assert not all(
            np.array_equal(np.asarray(leaf), old) for leaf, old in zip(runner._adapters.leaves, written, strict=True)
        )
        calls = list(runner.adapter_calls(changes))
        assert [name for name, _ in calls if name != "stage_adapter"] == [
            *["load_staged_adapter"] * 2,
            "set_adapter_slots",
        ]
        assert max(argument.size for name, argument in calls if name == "stage_adapter") == 1000 < len(calls) * 1000
        for name, argument in calls:
            getattr(runner, name)(from_message(to_message(argument)))
        for leaf, old in zip(runner._adapters.leaves, written, strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), old)
        assert written[-1].tolist() == [-1, -1, 0, -1, -1, 1, -1, -1]
