"""Tests the limits that a server chooses where the options say `auto`, and the memory that it claims."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands.cli import main
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.options.toml_file import read_toml
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.resolve.auto_limits import StepLimits, choose_limits, usable_share
from meshserve.runtime.resolve.kernel_costs import KernelCosts
from meshserve.runtime.resolve.kernel_selection import device_like, name_kernels
from meshserve.runtime.resolve.kernel_shapes import KernelShapes
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding import mesh
from meshserve.sharding.chips import CHIPS, GPUAttributes, gpu_of, target

UNKNOWN = gpu_of(GPUAttributes("NVIDIA unheard of", (8, 6), 24 << 30, 60, 1.7e9, 7e11))


def limits(
    model: str, chip: str | None, num_devices: int = 1, platform: str = "gpu", quantize: str = "none", **options: Any
) -> StepLimits:
    config, bfloat16, found = ServeConfig(**options), jnp.dtype("bfloat16"), named_model(model, quantize)
    layout = model_layout(found, num_devices)
    shapes = KernelShapes(model=found, layout=layout, dtype=bfloat16, cache_dtype=bfloat16, page_size=config.page_size)
    card = CHIPS[chip] if chip else UNKNOWN if platform == "gpu" else CHIPS["cpu"]
    device = device_like(card)._replace(platform=platform)
    names = name_kernels(config, device, shapes).names
    return choose_limits(config, KernelCosts(shapes=shapes, names=names), platform=platform, chip=card)


def chosen(*values: int) -> StepLimits:
    names = ("max_running", "max_step_tokens", "max_prefill_tokens", "max_decode_steps", "low_load_prefill_tokens")
    values += (0,) if len(values) < len(names) else ()
    return StepLimits(**dict(zip(names, values, strict=True)))


def test_a_gpu_gets_what_was_measured():
    assert limits("qwen3-0.6b", "h200") == chosen(256, 8192, 8192, 4)
    assert limits("qwen3-8b", "h200") == chosen(256, 8192, 4096, 1, 1024)
    assert limits("qwen3-32b", "h200") == chosen(256, 8192, 1024, 1, 256)
    assert limits("qwen3-30b-a3b", "h200") == chosen(256, 16384, 8192, 1, 2048)


def test_quantized_weights_count_with_their_bytes():
    steps = [limits("qwen3-4b", "h200", quantize=scheme).max_decode_steps for scheme in ("none", "fp8-block", "int4")]
    assert steps == [1, 4, 4]
    steps = [limits("qwen3-8b", "h200", quantize=scheme).max_decode_steps for scheme in ("fp8-block", "int4")]
    assert steps == [1, 1]


def test_dispatches_hold_several_steps_while_few_experts_are_read():
    requests = [
        limits("qwen3-30b-a3b", "h200", num_devices, quantize=scheme).multi_step_requests
        for num_devices, scheme in ((1, "none"), (1, "fp8-block"), (2, "fp8-block"), (4, "fp8-block"))
    ]
    assert requests == [0, 1, 4, 8]
    assert limits("qwen3-30b-a3b", "h200", quantize="fp8-block").max_decode_steps == 4
    assert limits("qwen3-30b-a3b", "h200", max_decode_steps=4).multi_step_requests == 0  # as asked, with any number
    assert limits("qwen3-30b-a3b", "h200", quantize="fp8-block", page_size=1).multi_step_requests == 0


def test_fp8_products_prefill_more_in_the_same_time():
    assert limits("qwen3-8b", "h200", quantize="fp8-block") == chosen(256, 8192, 8192, 1, 2048)
    assert limits("qwen3-32b", "h200", quantize="fp8-block") == chosen(256, 8192, 1024, 1, 512)
    slower = [
        limits("qwen3-8b", "h200", quantize="int4"),
        limits("qwen3-8b", "a100", quantize="fp8-block"),
        limits("qwen3-8b", "h200", quantize="fp8-block", linear="xla"),
    ]
    assert max(each.max_prefill_tokens for each in slower) == 4096


def test_devices_that_share_a_model_prefill_more_in_the_same_time():
    sizes = [limits("qwen3-32b", "h100", num_devices).max_prefill_tokens for num_devices in (1, 2, 4)]
    assert sizes == [1024, 2048, 4096]


def test_an_unknown_gpu_is_taken_for_a_small_one():
    found = limits("qwen3-8b", None)
    assert found.max_step_tokens < 8192 and found.max_prefill_tokens < 4096 and found.max_decode_steps == 1


def test_other_devices_stay_small():
    for platform in ("cpu", "tpu"):
        assert limits("qwen3-8b", None, platform=platform) == chosen(64, 512, 0, 1)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_asked_for_is_taken(platform: str):
    asked = {"max_running": 7, "max_step_tokens": 96, "max_prefill_tokens": 50, "max_decode_steps": 3}
    assert limits("qwen3-8b", "h200", platform=platform, **asked) == chosen(7, 96, 50, 3)
    assert limits("qwen3-8b", "h200", platform=platform, max_step_tokens=8).max_running == 8
    assert limits("qwen3-8b", "h200", platform=platform, max_prefill_tokens=8192).low_load_prefill_tokens == 0
    assert limits("qwen3-8b", "h200", platform=platform, max_running=9000).max_step_tokens == 9000
    assert limits("qwen3-0.6b", "h200", platform=platform, page_size=1).max_decode_steps == 1


def test_auto_is_a_value_of_flags_and_files(tmp_path, capsys):
    path = tmp_path / "serve.toml"
    path.write_text('max_running = "auto"\nmemory_fraction = "auto"\n')
    assert read_toml(path) == {"max_running": 0, "memory_fraction": 0.0}
    path.write_text('page_size = "auto"\n')
    with pytest.raises(ConfigError, match="page_size is 'auto'; it must be of type int"):
        read_toml(path)
    assert main(["plan", "--model", "qwen3-8b", "--target", "h200:1", "--max-running", "auto"]) == 0
    assert "max_running 256, max_step_tokens 8192" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["serve", "--page-size", "auto"])
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "(default: auto)" in " ".join(capsys.readouterr().out.split())


def test_a_gpus_memory_is_claimed_where_there_is_a_plugin(monkeypatch: pytest.MonkeyPatch):
    updates = []
    monkeypatch.setattr(mesh.jax.config, "update", lambda *update: updates.append(update))
    monkeypatch.setattr(mesh.importlib.util, "find_spec", lambda name: None)
    mesh.claim_gpu_memory(0.92)
    assert not updates
    monkeypatch.setattr(mesh.importlib.util, "find_spec", lambda name: "13" in name or None)
    mesh.claim_gpu_memory(0.92)
    assert updates == [("jax_pjrt_client_create_options", {"memory_fraction": 0.92})]


def test_dispatch_threads_leave_the_claim_of_memory(monkeypatch: pytest.MonkeyPatch):
    values: dict[str, object] = {"jax_pjrt_client_create_options": None}
    config = SimpleNamespace(values=values, update=values.__setitem__)
    monkeypatch.setattr(mesh, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(mesh.importlib.util, "find_spec", lambda name: True)
    mesh.claim_gpu_memory(0.92)
    mesh.use_dispatch_threads()
    assert values["jax_pjrt_client_create_options"] == {"memory_fraction": 0.92, "use_tfrt_gpu_client": True}


def test_the_usable_share_of_what_devices_report():
    shares = {platform: usable_share(ServeConfig(), platform) for platform in ("gpu", "tpu", "cpu")}
    assert shares == {"gpu": 1.0, "tpu": 0.85, "cpu": 0.85}
    assert usable_share(ServeConfig(memory_fraction=0.6), "tpu") == 0.6
    assert usable_share(ServeConfig(memory_fraction=0.6), "gpu") == 1.0


def test_the_plan_counts_the_memory_that_a_server_claims():
    planner = Planner.on(target("h200:1"), ServeConfig(model="qwen3-8b"), named_model("qwen3-8b"), num_devices=1)
    plan = planner.plan()
    assert plan.limit_bytes == int(CHIPS["h200"].hbm_bytes * 0.92)
    assert plan.served_tokens > 0.98 * 791_792  # compared with vLLM 0.26 at its default on the same GPU
    half = planner.replan(config=ServeConfig(model="qwen3-8b", memory_fraction=0.46)).plan()
    assert half.limit_bytes == pytest.approx(plan.limit_bytes / 2, rel=0.001) and half.served_pages < plan.served_pages
