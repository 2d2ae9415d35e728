"""Quantized models served from the command line, planned, and described to clients."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshserve.runtime.api.proto_codec import model_info, model_info_response
from meshserve.runtime.commands.cli import main
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.plan.roofline import Roofline
from meshserve.runtime.resolve.kernel_shapes import KernelShapes
from meshserve.runtime.startup.launch import launch
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import abstract_model, named_model, read_model, weight_bytes
from meshserve.sharding.chips import CHIPS, target
from meshserve.sharding.mesh import make_mesh, named_sharding
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.exact_model import exact_logits, our_logits, relative_error

pytestmark = pytest.mark.usefixtures("greedy_programs")

BFLOAT16 = jnp.dtype("bfloat16")
# Few shapes, because compiling them is what takes the time.
SMALL = {"max_running": 2, "max_step_tokens": 4, "page_size": 16, "num_pages": 64, "cache_dir": ""}
PROMPTS = ["First Citizen:\nBefore we proceed", "MACBETH:\nIs this a dagger"]


def generated(directory: Path, *, fp8_head: bool = False, **options: object) -> list[list[int]]:
    """Runs `meshserve generate` with the demo model and returns the token ids."""
    source, target_file = directory / "in.jsonl", directory / "out.jsonl"
    lines = [{"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True} for prompt in PROMPTS]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | options).items()]
    flags += ["--fp8-head"] if fp8_head else []
    flags.append("--no-logits-processors")
    assert main(["generate", "--model=demo", *flags, f"--input={source}", f"--output={target_file}"]) == 0
    return [json.loads(line)["token_ids"] for line in target_file.read_text().splitlines()]


def test_a_quantized_server_generates_the_same_tokens_at_any_tp_size(tmp_path: Path) -> None:
    """Also in chunks of another size and with a reused prefix, in an 8-bit cache."""
    options = {"quantize": "fp8-block", "kv_dtype": "fp8", "dtype": "float32"}
    expected = generated(tmp_path, tp=1, **options)
    assert [len(tokens) for tokens in expected] == [12, 12]
    assert generated(tmp_path, tp=4, cpu_devices=8, **options) == expected
    for sizes in ({"tp": 1}, {"tp": 4, "cpu_devices": 8}):
        assert generated(tmp_path, dequantize="always", **sizes, **options) == expected


def model_of(quantize: str, *, fp8_head: bool = False) -> ModelConfig:
    """Returns the config of the demo model."""
    config_file = DEMO_DIRECTORY / "config.json"
    return read_model(config_file, quantize, fp8_head=fp8_head)


def test_a_server_says_what_is_quantized() -> None:
    config = ServeConfig(model="demo", quantize="int4", fp8_head=True, kv_dtype="fp8", logits_processors=False, **SMALL)
    launched = launch(config, lambda outputs: None)
    assert launched.info.quantization == "int4-group-64, head fp8-channel"
    assert launched.info.kv_cache_dtype == "float8_e4m3fn"
    assert launched.info.dtype == "float32"
    assert model_info(model_info_response(launched.info)) == launched.info
    runner = launched.engine.runner
    planned = Planner.on(target("cpu:1"), config, model_of("int4", fp8_head=True), num_devices=1).plan()
    assert planned.weight_bytes == runner.figures.weight_bytes
    assert planned.page_bytes == runner.figures.page_bytes


def test_a_server_with_dequantized_layers_is_planned_and_described_so() -> None:
    config = ServeConfig(model="demo", quantize="fp8-block", dequantize="always", logits_processors=False, **SMALL)
    launched = launch(config, lambda outputs: None)
    assert launched.info.quantization == "dequantized fp8-block-128x128"
    planned = Planner.on(target("cpu:1"), config, model_of("fp8-block"), num_devices=1).plan()
    assert planned.quantization == "dequantized fp8-block-128x128"
    assert planned.weight_bytes == launched.engine.runner.figures.weight_bytes
    plain = Planner.on(target("cpu:1"), ServeConfig(model="demo", **SMALL), model_of("none"), num_devices=1).plan()
    assert planned.weight_bytes == plain.weight_bytes


# --- plan


def counted_bytes(quantize: str, tp: int, *, fp8_head: bool = False, size: str = "qwen3-8b") -> int:
    """Returns the bytes of the shapes that the parameters have on one device of a mesh."""
    config = named_model(size, quantize, fp8_head=fp8_head)
    _, abstract = abstract_model(config, model_layout(config, tp), BFLOAT16)
    mesh, total = make_mesh(tp), 0
    for _, weight in nnx.to_flat_state(abstract):
        shape = named_sharding(mesh, weight.axes).shard_shape(weight.shape)
        total += int(np.prod(shape)) * weight.get_value().dtype.itemsize
    return total


@pytest.mark.parametrize("quantize", ["fp8-block", "fp8-channel", "int4"])
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_planned_bytes_are_those_of_the_parameters(quantize: str, tp: int) -> None:
    for size in ("qwen3-8b", "qwen3-4b"):  # at TP 8, a shard of the 4B cuts blocks
        config = named_model(size, quantize)
        planned = weight_bytes(config, model_layout(config, tp), BFLOAT16)
        assert planned == pytest.approx(counted_bytes(quantize, tp, size=size), rel=1e-9)


def test_an_8b_in_fp8_takes_half_the_memory() -> None:
    assert counted_bytes("none", 1) == pytest.approx(16.38e9, rel=0.001)
    assert counted_bytes("fp8-block", 1) < 8.9 * 2**30
    assert counted_bytes("fp8-block", 1, fp8_head=True) < 8.9e9
    assert counted_bytes("int4", 1, fp8_head=True) < 5.5e9


@pytest.mark.parametrize("tp", [1, 4])
def test_a_tied_head_in_fp8_takes_more_memory_and_less_time(tp: int) -> None:
    """The 0.6B keeps its embedding, and reads a copy of a byte for each weight, with a scale for each row."""
    plain, with_head = named_model("qwen3-0.6b", "fp8-block"), named_model("qwen3-0.6b", "fp8-block", fp8_head=True)
    layout, rows = model_layout(plain, tp), 151_936 // tp
    planned = [weight_bytes(model, layout, BFLOAT16) for model in (plain, with_head)]
    assert planned[1] == counted_bytes("fp8-block", tp, fp8_head=True, size="qwen3-0.6b")
    assert planned[1] - planned[0] == rows * (1024 + 4)
    read = [
        Roofline(
            shapes=KernelShapes(model=model, layout=layout, dtype=BFLOAT16, cache_dtype=BFLOAT16, page_size=32),
            chip=CHIPS["h200"],
        ).weight_bytes
        for model in (plain, with_head)
    ]
    assert read[0] - read[1] == rows * 1024
    assert with_head.num_params == plain.num_params


def test_plan_prints_what_is_quantized(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model=qwen3-8b", "--target=h100:1", "--quantize=fp8-block", "--fp8-head", "--kv-dtype=fp8"]
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    assert "bfloat16, weights fp8-block-128x128, head fp8-channel, KV cache float8_e4m3fn, per device" in text
    assert "8.21 GiB" in text
    assert main(["plan", *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weight_bytes"] == counted_bytes("fp8-block", 1, fp8_head=True)
    assert plan["page_bytes"] == 36 * 8 * 2 * 32 * 128
    assert plan["cache_dtype"] == "float8_e4m3fn"


# --- the output head


def test_a_head_in_fp8_is_near_the_original(tmp_path: Path) -> None:
    checkpoint = formats.save(tmp_path, "packed-32", num_hidden_layers=1)
    token_ids = list(range(12))
    expected = exact_logits(checkpoint.weights, checkpoint.raw, token_ids)
    for tp in (1, 4):
        error = relative_error(our_logits(checkpoint.directory, token_ids, tp, fp8_head=True), expected)
        assert 1e-3 < error < 0.04


def test_a_tied_head_in_fp8_generates_the_same_tokens_at_any_tp_size(tmp_path: Path) -> None:
    expected = generated(tmp_path, tp=1, dtype="float32", fp8_head=True)
    assert generated(tmp_path, tp=4, cpu_devices=8, dtype="float32", fp8_head=True) == expected
