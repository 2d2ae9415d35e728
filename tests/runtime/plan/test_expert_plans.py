"""What a plan says of a mixture-of-experts model: bytes, active weights, both splits, the busiest device's load."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.benchmarks.checks import check_tpu
from meshserve.benchmarks.engine.prefill import linear_flops
from meshserve.runtime.plan.report import make_report, report_text
from meshserve.runtime.plan.tp_choice import roofline_of
from meshserve.runtime.resolve.expert_load import expert_load
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model, weight_bytes
from tests.runtime.plan.test_memory_plan import plan


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-coder-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("qwen3-coder-480b-a35b", 480, 35),
    ],
)
def test_sizes_are_those_published(name, billions, active_billions):
    model = named_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.num_active_params / 1e9 == pytest.approx(active_billions, rel=0.03)
    assert weight_bytes(model, model_layout(model, 1), jnp.dtype("bfloat16")) == 2 * model.num_params


def test_dense_models_pass_through_all_their_weights():
    model = named_model("qwen3-8b")
    assert model.num_active_params == model.num_params
    sparse = named_model("qwen3-30b-a3b")
    tables = 2 * sparse.vocab_size * sparse.embed_dim
    assert linear_flops(sparse) == pytest.approx(2 * (sparse.num_active_params - tables), rel=0.01)


def test_both_splits_take_the_same_bytes_where_nothing_is_padded():
    model = named_model("qwen3-30b-a3b")
    splits = [model_layout(model, 8, expert_parallel=by_expert) for by_expert in (False, True)]
    by_tensor, by_expert = (weight_bytes(model, layout, jnp.dtype("bfloat16")) for layout in splits)
    assert by_tensor == by_expert == pytest.approx(2 * model.num_params / 8, rel=0.01)


def test_the_load_is_that_of_drawn_choices():
    """Against a simulation of its own: by tensor the experts read, by expert those of the busiest of 8 devices."""
    model = named_model("qwen3-30b-a3b")
    rng = np.random.default_rng(7)
    draws = [np.stack([rng.permutation(128)[:8] for _ in range(32)]) for _ in range(200)]
    counts = np.stack([np.bincount(draw.ravel(), minlength=128) for draw in draws])
    by_tensor = expert_load(model.experts, model_layout(model, 8), 32)
    assert by_tensor.num_experts == pytest.approx(np.count_nonzero(counts, axis=1).mean(), rel=0.02)
    assert by_tensor.num_choices == 32 * 8
    by_expert = expert_load(model.experts, model_layout(model, 8, expert_parallel=True), 32)
    blocks = counts.reshape(200, 8, 16)
    assert by_expert.num_experts == pytest.approx(np.count_nonzero(blocks, axis=2).max(axis=1).mean(), rel=0.05)
    assert by_expert.num_choices == pytest.approx(blocks.sum(axis=2).max(axis=1).mean(), rel=0.05)
    assert expert_load(model.experts, model_layout(model, 8), 1).num_experts == pytest.approx(8)


def test_a_decode_step_reads_what_its_tokens_chose():
    planner = check_tpu.planner("qwen3-30b-a3b", "v6e:2x4")
    by_tensor, by_expert = (
        roofline_of(planner.replan(config=dataclasses.replace(planner.server.requested, expert_parallel=is_set)))
        for is_set in (False, True)
    )
    assert by_tensor is not None and by_expert is not None
    assert by_tensor.decode(1, 128).seconds < by_expert.decode(1, 128).seconds, "the devices' loads differ"
    few, many = by_tensor.read_weight_bytes(1), by_tensor.read_weight_bytes(4096)
    assert many == pytest.approx(by_tensor.weight_bytes, rel=1e-6)
    model = planner.server.model
    read = 2 * (model.num_active_params - model.vocab_size * model.embed_dim) / 8
    assert few == pytest.approx(read, rel=0.15), "KV heads and the router are repeated"


def test_the_report_names_the_split():
    planner = check_tpu.planner("qwen3-30b-a3b", "v6e:2x4", expert_parallel=True)
    report = make_report(planner, length=1024, batches=(1, 32))
    text = report_text(report)
    assert "by expert, 16 each" in text and "3.35 B" in text
    assert {item.name for item in report.tp_sizes} == {"1", "2", "2 by expert", "4", "4 by expert", "8", "8 by expert"}
    assert report.best is not None and report.best.flags == f"--tp {report.best.tp}"


@pytest.mark.parametrize(("scheme", "bits"), [("int4", 4 + 16 / 128), ("nvfp4", 4 + 8 / 16), ("mxfp4", 4 + 8 / 32)])
def test_4_bits_of_30b_a3b_and_20_000_tokens_fit_22_gb(scheme, bits, capsys):
    """Which is less than a card of 24 GB gives. Embedding, head, router and norms have 16 bits."""
    found = plan(capsys, "--model=qwen3-30b-a3b", f"--quantize={scheme}", "--target=l4:1")
    assert found["limit_bytes"] < 22e9
    assert found["served_pages"] * found["page_size"] >= 20_000
    embed, mlp, layers, experts, heads = 2048, 768, 48, 128, 32 + 2 * 4
    quantized = layers * (embed * 128 * (heads + 32) + 3 * experts * embed * mlp)
    plain = 2 * 151_936 * embed + layers * (experts * embed + 2 * embed + 2 * 128) + embed
    assert found["weight_bytes"] == pytest.approx(quantized * bits / 8 + 2 * plain, rel=1e-4)


@pytest.mark.parametrize("scheme", ["int4", "nvfp4", "mxfp4"])
def test_each_split_of_4_bit_experts_has_its_share(scheme, capsys):
    """Split by tensor, a device has scales for parts of groups, which are a few more."""
    flags = ("--model=qwen3-30b-a3b", f"--quantize={scheme}", "--target=h100:4")
    whole = plan(capsys, "--model=qwen3-30b-a3b", f"--quantize={scheme}", "--target=h100:1")["weight_bytes"]
    by_tensor, by_expert = (
        plan(capsys, *flags, "--tp=4", *more)["weight_bytes"] for more in ((), ("--expert-parallel",))
    )
    assert whole / 4 < by_expert <= by_tensor < 1.03 * whole / 4
