"""Tests that a server is resolved once, into a frozen value without "auto", for present and absent devices alike."""

import dataclasses
from typing import Any

import jax
import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import ANY_MODE
from meshserve.runtime.resolve import resolved_server
from meshserve.runtime.resolve.auto_limits import StepLimits
from meshserve.runtime.resolve.kernel_costs import KernelCosts
from meshserve.runtime.resolve.p2p_selection import P2PFindings
from meshserve.runtime.resolve.resolved_server import PlacedServer, ResolvedServer, resolve_for, resolve_here
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS
from meshserve.sharding.mesh import make_mesh

MODEL = named_model("qwen3-0.6b")
CONFIG = ServeConfig(model="random", max_running=4, max_step_tokens=16, num_pages=8, dtype="auto")


def resolved_fields(server: ResolvedServer) -> dict[str, object]:
    """Returns the fields that do not depend on whether the devices are present."""
    return {field.name: getattr(server, field.name) for field in dataclasses.fields(ResolvedServer)}


@pytest.mark.parametrize("chip", ["cpu", "h100", "v6e"])
def test_nothing_resolved_is_auto(chip: str) -> None:
    server = resolve_for(CONFIG, MODEL, chip=CHIPS[chip], num_devices=2)
    asked = [name for name, value in vars(CONFIG).items() if value == "auto"]
    kernels = ["attention", "decode_layers", "moe_backend", "all_reduce", "linear", "gemm_backend"]
    assert asked == ["dtype", "task", "generation_config", "kv_dtype", "dequantize", "stored_programs", *kernels]
    for name, value in resolved_fields(server).items():
        assert name == "requested" or "auto" not in repr(value), name


def test_a_resolved_server_is_frozen() -> None:
    server = resolve_for(CONFIG, MODEL, chip=CHIPS["cpu"], num_devices=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        server.platform = "gpu"  # type: ignore[misc]


def test_present_devices_are_resolved_like_absent_ones() -> None:
    here = resolve_here(CONFIG, MODEL, make_mesh(2))
    planned = resolve_for(CONFIG, MODEL, chip=CHIPS["cpu"], num_devices=2)
    assert resolved_fields(here) == resolved_fields(planned)
    assert resolved_fields(resolved_server.place_on(planned, make_mesh(2))) == resolved_fields(planned)


def test_buckets_and_limits_follow_the_kernels() -> None:
    options = {"max_running": 64, "max_step_tokens": 512}
    config = dataclasses.replace(CONFIG, **options)
    gpu, cpu = (resolve_for(config, MODEL, chip=CHIPS[chip], num_devices=1) for chip in ("h200", "cpu"))
    assert gpu.kernel_names.has_decode_kernels and not cpu.kernel_names.has_decode_kernels
    assert any(bucket.is_decode for bucket in gpu.buckets) and not any(bucket.is_decode for bucket in cpu.buckets)
    assert gpu.limits.step_sizes == (256, 512)
    assert (gpu.dtype.name, cpu.dtype.name) == ("bfloat16", "float32")


def test_padding_is_free_until_each_expert_has_a_tile_of_tokens() -> None:
    model = named_model("qwen3-30b-a3b")
    server = resolve_for(ServeConfig(model="qwen3-30b-a3b"), model, chip=CHIPS["h200"], num_devices=1)
    assert server.limits.step_sizes == (2048, 4096, 8192, 16_384)
    bounded = ServeConfig(model="qwen3-30b-a3b", max_prefill_tokens=1024)
    assert resolve_for(bounded, model, chip=CHIPS["h200"], num_devices=1).limits.step_sizes[0] == 1024


@pytest.mark.parametrize(
    ("num_devices", "options", "is_by_mode"),
    [
        (4, {}, True),
        (4, {"max_decode_steps": 4}, True),
        (4, {"all_reduce": "xla"}, False),  # its all-reduces end the graph in each layer
        (4, {"draft_tokens": 3}, False),
        (8, {}, False),  # no P2P
        (1, {"all_reduce": "p2p"}, False),  # no all-reduces
    ],
)
def test_large_decodes_have_a_program_per_mode_where_p2p_keeps_them_in_a_graph(
    num_devices: int, options: dict[str, Any], is_by_mode: bool
) -> None:
    config = ServeConfig(model="random", max_running=256, **options)
    server = resolve_for(config, named_model("qwen3-8b"), chip=CHIPS["h200"], num_devices=num_devices)
    large = [each for each in server.buckets if each.is_decode and not each.has_drafts and each.num_tokens > 128]
    modes = list(SamplingMode) if is_by_mode else [ANY_MODE]
    for size in (192, 256):
        for num_steps in {1, server.limits.max_decode_steps}:
            found = [each.mode for each in large if (each.num_tokens, each.num_steps) == (size, num_steps)]
            assert found == modes
    assert len({each.key for each in server.buckets}) == len(server.buckets)


def test_a_model_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="tp is 3, which does not divide"):
        resolve_for(CONFIG, MODEL, chip=CHIPS["cpu"], num_devices=3)
    with pytest.raises(ConfigError, match="max_context is 1000000"):
        resolve_for(dataclasses.replace(CONFIG, max_context=1_000_000), MODEL, chip=CHIPS["cpu"], num_devices=1)


def test_another_tp_size_is_resolved_from_the_requested_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the layers and the findings of the startup are kept; the all-reduce is selected again."""
    server = resolve_here(CONFIG, MODEL, make_mesh(2))
    names = dataclasses.replace(server.kernel_names, decode_layers="reference", all_reduce="p2p")
    findings = P2PFindings(wrong_sums="3 elements of sums were wrong")
    server = dataclasses.replace(server, kernel_names=names, findings=findings)
    asked: list[ServeConfig] = []
    select_kernels = resolved_server.select_kernels

    def select(config, shapes, mesh, found):
        asked.append(config)
        assert found is findings
        return select_kernels(config, shapes, mesh, found)

    monkeypatch.setattr(resolved_server, "select_kernels", select)
    moved = server.on_mesh(make_mesh(4))
    assert isinstance(moved, PlacedServer) and (moved.tp, moved.mesh.size, moved.findings) == (4, 4, findings)
    assert moved.kernel_names.decode_layers == "reference" and moved.kernel_names.all_reduce == "xla"
    assert (asked[0].decode_layers, asked[0].all_reduce) == ("reference", "auto")
    assert moved.requested == dataclasses.replace(CONFIG, tp=4)


def test_another_tp_size_keeps_the_shapes_by_which_the_engine_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, `auto` chooses otherwise for more devices: a decode of an 8B takes each of four H200s under a ms."""
    alone, divided = (
        resolve_for(ServeConfig(model="random"), named_model("qwen3-8b"), chip=CHIPS["h200"], num_devices=tp)
        for tp in (1, 4)
    )
    assert (alone.step_limits.max_decode_steps, divided.step_limits.max_decode_steps) == (1, 4)
    choose_limits = resolved_server.choose_limits

    def choose(config: ServeConfig, costs: KernelCosts, **details: Any) -> StepLimits:
        limits = choose_limits(config, costs, **details)
        return dataclasses.replace(limits, max_decode_steps=costs.shapes.layout.num_shards)

    monkeypatch.setattr(resolved_server, "choose_limits", choose)
    for tp in (1, 4):
        server = resolve_here(CONFIG, MODEL, make_mesh(tp))
        moved = server.on_mesh(make_mesh(5 - tp))
        kept = ("buckets", "limits", "step_limits")
        assert [getattr(moved, name) for name in kept] == [getattr(server, name) for name in kept]


def test_parameters_have_the_shardings_of_the_mesh() -> None:
    server = resolve_here(CONFIG, MODEL, make_mesh(2))
    _, params = server.abstract_params()
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == server.dtype and leaf.sharding.mesh == server.mesh
