"""Tests what steps cost with each kind of kernels."""

import math
from typing import Any

import jax.numpy as jnp
import pytest

from meshserve.kernels.implementation import Cost, Device, Implementation
from meshserve.kernels.paged_attention import IMPLEMENTATIONS, AttentionShapes, AttentionStep
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.resolve.kernel_costs import LAUNCH_SECONDS, KernelCosts, seconds_on
from meshserve.runtime.resolve.kernel_selection import name_kernels
from meshserve.runtime.resolve.kernel_shapes import KernelShapes
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS

HOPPER, AMPERE = Device("gpu", "NVIDIA H200", (9, 0)), Device("gpu", "NVIDIA A100", (8, 0))
TURING = Device("gpu", "Tesla T4", (7, 5))
WITHOUT_KERNELS = {"attention": "reference", "decode_layers": "off", "linear": "xla", "moe_backend": "xla"}
BFLOAT16 = jnp.dtype("bfloat16")


def costs(size: str, device: Device | None = HOPPER, scheme: str = "none", tp: int = 1, **options: Any) -> KernelCosts:
    """Returns the costs with the kernels of a device, or with the least that any take."""
    model = named_model(size, scheme)
    shapes = KernelShapes(
        model=model, layout=model_layout(model, tp), dtype=BFLOAT16, cache_dtype=BFLOAT16, page_size=32
    )
    names = None if device is None else name_kernels(ServeConfig(model=size, **options), device, shapes).names
    return KernelCosts(shapes=shapes, names=names)


@pytest.mark.parametrize(
    ("size", "scheme"), [("qwen3-8b", "none"), ("qwen3-8b", "fp8-block"), ("qwen3-30b-a3b", "none")]
)
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_hopper_kernels_take_the_least(size: str, scheme: str, batch: int) -> None:
    ours, least = (costs(size, device, scheme).decode(batch, 1024) for device in (HOPPER, None))
    assert ours.num_bytes == pytest.approx(least.num_bytes, rel=1e-3)
    operations = [each.operations + each.fp8_operations for each in (ours, least)]
    assert operations[0] == pytest.approx(operations[1], rel=1e-3)
    assert ours.num_launches == ours.float32_operations == 0


def test_the_least_is_the_weights_and_the_keys() -> None:
    least = costs("qwen3-8b", None)
    decode = least.decode(32, 1024) + least.head(32)
    model = named_model("qwen3-8b")
    weights = model.num_params - model.vocab_size * model.embed_dim
    keys = 32 * 1024 * 36 * 8 * 2 * 128
    assert decode.num_bytes == pytest.approx(2 * (weights + keys), rel=1e-3)
    assert decode.operations == pytest.approx(2 * 32 * weights + 32 * 1024 * 36 * 32 * 128 * 4, rel=1e-3)


def test_tensor_parallel_devices_share_the_costs() -> None:
    whole, part = (costs("qwen3-8b", tp=tp).decode(8, 1024) for tp in (1, 4))
    assert part.num_bytes == pytest.approx(whole.num_bytes / 4, rel=1e-3)


def test_the_reference_gathers_a_page_for_each_token_in_each_pass() -> None:
    shapes = AttentionShapes(
        kv_heads=8, group=4, head_dim=128, page_size=32, dtype=BFLOAT16, cache_dtype=jnp.dtype("float8_e4m3fn")
    )
    cost = IMPLEMENTATIONS["reference"].cost(shapes, AttentionStep(16, num_keys=700, num_pairs=700, longest=100))
    page_values, num_passes = 8 * 2 * 32 * 128, 4
    assert cost.num_bytes > 16 * num_passes * page_values * (1 + 4 + 4)
    assert cost.num_bytes == pytest.approx(16 * num_passes * page_values * 9, rel=0.2)
    assert cost.float32_operations == 16 * num_passes * 32 * 4 * 32 * 128 and cost.operations == 0
    assert cost.num_launches == 10 * num_passes
    assert cost.scratch_bytes == 16 * page_values * 5


def test_prompts_without_kernels_take_what_was_measured() -> None:
    """Qwen3-8B on an H200 computed 3,648 tokens/s, and with its own kernels 41,000."""
    chip = CHIPS["h200"]
    slow, fast = costs("qwen3-8b", **WITHOUT_KERNELS), costs("qwen3-8b")
    assert 8192 / slow.prompt_seconds(chip, 8192, 1024) == pytest.approx(3648, rel=0.02)
    assert 8192 / fast.prompt_seconds(chip, 8192, 1024) == pytest.approx(41_000, rel=0.1)


def test_dequantized_weights_are_written_and_read_again() -> None:
    plain, fp8 = (costs("qwen3-8b", TURING, scheme).products(1) for scheme in ("none", "fp8-block"))
    assert fp8.num_bytes == pytest.approx(2.5 * plain.num_bytes, rel=0.01), "slower than without quantization"
    few, many = (costs("qwen3-8b", AMPERE, "fp8-block").products(num_tokens).num_bytes for num_tokens in (64, 65))
    assert (few, many) == pytest.approx((plain.num_bytes / 2, 2.5 * plain.num_bytes), rel=0.01)
    hopper = costs("qwen3-8b", HOPPER, "fp8-block").products(128)
    assert hopper.num_bytes == pytest.approx(plain.num_bytes / 2, rel=0.01)
    assert hopper.operations == 0 and hopper.fp8_operations == pytest.approx(128 * plain.num_bytes, rel=0.01)


def test_experts_without_kernels_are_copied_tile_by_tile() -> None:
    ours, xla = (costs("qwen3-30b-a3b", device).experts(1) for device in (HOPPER, TURING))
    assert xla.num_bytes == pytest.approx(3 * ours.num_bytes, rel=0.01)
    assert xla.num_launches == 48 * 8 * 10 and ours.num_launches == 0


def test_launches_are_added_to_what_overlaps() -> None:
    chip = CHIPS["a100"]
    cost = Cost(num_bytes=2039e9, operations=3 * 312e12, num_launches=1 / LAUNCH_SECONDS)
    seconds = seconds_on(chip, cost)
    assert seconds == pytest.approx((1.0, 3.0, 1.0)) and seconds.total == pytest.approx(4.0)
    assert seconds.bound == "compute"
    assert seconds_on(chip, Cost(num_launches=1)).bound == "launches"
    half = Implementation[Any](name="half", reached=0.5, bytes_reached=0.1)
    assert seconds_on(chip, cost, half) == pytest.approx((10.0, 6.0, 1.0))
    vectors = seconds_on(CHIPS["v6e"], Cost(float32_operations=918e12, fp8_operations=918e12))
    assert math.isclose(vectors.compute, 2.0), "a TPU's data sheet has one speed"
