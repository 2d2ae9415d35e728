"""Tests which kernels "auto" selects, and what happens if they cannot be used."""

import dataclasses
import logging
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshserve.kernels import sampling
from meshserve.kernels.implementation import Device
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.model_files.model_config import ModelConfig, Pooling
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.resolve.kernel_log import log_kernels, log_quantization, products_left_to_xla
from meshserve.runtime.resolve.kernel_names import KernelNames
from meshserve.runtime.resolve.kernel_selection import max_fused_prompt_tokens, max_fused_tokens, name_kernels
from meshserve.runtime.resolve.kernel_shapes import KernelShapes, served_model
from meshserve.runtime.resolve.resolved_server import resolve_for
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model, weight_bytes
from meshserve.sharding.chips import CHIPS

MODEL = named_model("qwen3-8b")
EXPERTS = named_model("qwen3-30b-a3b")
EMBEDDING = Pooling(score_token_ids=None)
HOPPER, AMPERE = Device("gpu", "NVIDIA H200", (9, 0)), Device("gpu", "NVIDIA A100", (8, 0))
TURING = Device("gpu", "NVIDIA T4", (7, 5))
CPU, TPU = Device("cpu", "cpu"), Device("tpu", "TPU v6 lite")


def shapes(
    num_devices: int, page_size: int = 32, model: ModelConfig = MODEL, cache_dtype: str = "bfloat16"
) -> KernelShapes:
    return KernelShapes(
        model=model,
        layout=model_layout(model, num_devices),
        dtype=jnp.dtype("bfloat16"),
        cache_dtype=jnp.dtype(cache_dtype),
        page_size=page_size,
    )


def named(device: Device, found: KernelShapes, **options: object) -> KernelNames:
    return name_kernels(ServeConfig(model="random", **options), device, found).names


def refusals(found: KernelShapes, device: Device = HOPPER) -> dict[str, str]:
    """Returns why Hopper's kernels cannot serve, by option."""
    kernels = name_kernels(ServeConfig(model="random"), device, found)
    return {refusal.option: refusal.reason for refusal in kernels.refusals}


@pytest.mark.parametrize(
    ("device", "num_devices", "options", "all_reduce"),
    [
        (HOPPER, 4, {}, "p2p"),
        (HOPPER, 2, {}, "p2p"),
        (HOPPER, 1, {}, "xla"),
        (HOPPER, 8, {}, "xla"),  # not measured
        (TPU, 4, {}, "xla"),
        (CPU, 4, {}, "xla"),
        (AMPERE, 4, {}, "xla"),
        (HOPPER, 4, {"decode_layers": "off"}, "p2p"),
        (HOPPER, 4, {"coordinator": "host:1"}, "xla"),
        (HOPPER, 4, {"all_reduce": "xla"}, "xla"),
        (HOPPER, 8, {"all_reduce": "p2p"}, "p2p"),
    ],
    ids=str,
)
def test_gpus_of_one_process_with_our_kernels_use_p2p(
    device: Device, num_devices: int, options: dict[str, object], all_reduce: str
) -> None:
    assert named(device, shapes(num_devices), **options).all_reduce == all_reduce


def test_kernels_that_cannot_be_built_are_never_replaced_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with nvcc from jax's packages, and without a C++ compiler."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho gcc: No such file or directory >&2\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    message = (
        "there are kernels for this NVIDIA H200, but this host cannot build them: nvcc finds no C++ compiler; install "
        "g++ (apt-get install g++). To serve without them, many times slower, set --attention reference."
    )
    quantized = named_model("qwen3-8b", "fp8-block")
    for model in (MODEL, EXPERTS, quantized):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            name_kernels(ServeConfig(), HOPPER, shapes(1, model=model), is_present=True)
    asked = name_kernels(ServeConfig(attention="reference"), HOPPER, shapes(1, model=quantized), is_present=True)
    assert (asked.names.attention, asked.names.decode_layers, asked.names.linear) == ("reference", "off", "xla")
    assert {refusal.option for refusal in asked.refusals} == {"decode_layers", "linear"}
    with pytest.raises(ValueError, match="--attention cuda cannot serve this model here: nvcc finds no C"):
        name_kernels(ServeConfig(attention="cuda"), HOPPER, shapes(1), is_present=True)
    with pytest.raises(ConfigError, match="^there are kernels for this NVIDIA A100, but this host cannot build them"):
        name_kernels(ServeConfig(), AMPERE, shapes(1), is_present=True)
    assert name_kernels(ServeConfig(), TURING, shapes(1), is_present=True).names.attention == "reference"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (HOPPER, ("cuda", "cuda", "cuda_fp8", "cuda")),
        (AMPERE, ("portable", "off", "portable", "portable")),
        (Device("gpu", "NVIDIA B200", (10, 0)), ("portable", "off", "portable", "portable")),
        (TURING, ("reference", "off", "xla", "xla")),
        (Device("gpu", "gfx942"), ("reference", "off", "xla", "xla")),
        (TPU, ("tpu", "off", "xla", "tpu")),
        (CPU, ("reference", "off", "xla", "xla")),
    ],
)
def test_each_device_gets_the_first_kernels_that_can_serve(device: Device, expected: tuple[str, ...]) -> None:
    found = named(device, shapes(1, model=named_model("qwen3-30b-a3b", "fp8-block")))
    assert (found.attention, found.decode_layers, found.linear, found.moe_backend) == expected


def test_a_fallback_keeps_its_reasons() -> None:
    reason = "the CUDA kernels need compute capability 9.0 (Hopper); NVIDIA A100 has 8.0"
    assert refusals(shapes(2), AMPERE) == dict.fromkeys(("attention", "decode_layers"), reason)
    fp8_experts = shapes(1, model=named_model("qwen3-30b-a3b", "fp8-block"))
    assert refusals(fp8_experts, AMPERE) == dict.fromkeys(
        ("attention", "decode_layers", "linear", "moe_backend"), reason
    )
    assert refusals(fp8_experts) == refusals(shapes(1), CPU) == refusals(shapes(1), TPU) == {}


def test_the_reasons_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found = name_kernels(ServeConfig(model="random"), AMPERE, shapes(1))
    with caplog.at_level(logging.INFO):
        log_kernels(*found, has_experts=False)
    assert (
        "attention: portable instead of cuda; decode layers: off instead of cuda, which is slower: the CUDA kernels "
        "need compute capability 9.0 (Hopper); NVIDIA A100 has 8.0"
    ) in caplog.text
    assert caplog.text.count("Hopper") == 1 and "attention: portable; decode layers: off" in caplog.text


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (
            AMPERE,
            {"attention": "cuda"},
            "--attention cuda cannot serve .*: the CUDA kernels need compute capability 9.0",
        ),
        (AMPERE, {"decode_layers": "cuda"}, "--decode-layers cuda cannot .* NVIDIA A100 has 8.0"),
        (AMPERE, {"all_reduce": "p2p"}, "--all-reduce p2p cannot serve this model here: the CUDA kernels need compute"),
        (CPU, {"attention": "tpu"}, "--attention tpu cannot serve this model here: the backend is cpu"),
        (CPU, {"moe_backend": "cuda"}, "--moe-backend cuda cannot .* need an NVIDIA Hopper GPU; this is a cpu device"),
        (CPU, {"moe_backend": "portable"}, "--moe-backend portable cannot .* an NVIDIA GPU; this is a cpu device"),
        (TURING, {"moe_backend": "portable"}, "--moe-backend portable cannot .* capability 8.0"),
        (HOPPER, {"all_reduce": "p2p", "coordinator": "host:1"}, "--all-reduce p2p .*belong to several processes"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_why(device: Device, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named(device, shapes(2), **options)


@pytest.mark.parametrize(
    ("weights", "hopper", "ampere"),
    [
        ("", "cuda", "portable"),
        ("fp8-block", "cuda", "portable"),
        ("int4", "portable", "portable"),
        ("nvfp4", "xla", "xla"),
    ],
)
def test_portable_experts_serve_what_hoppers_do_not(weights: str, hopper: str, ampere: str) -> None:
    model = named_model("qwen3-30b-a3b", weights) if weights else EXPERTS
    for device, expected in ((HOPPER, hopper), (AMPERE, ampere)):
        assert named(device, shapes(1, model=model)).moe_backend == expected
        assert named(device, shapes(1, model=EXPERTS), moe_backend="portable").moe_backend == "portable"


def test_a_tpu_attends_with_xla_if_its_kernel_does_not_support_the_pages() -> None:
    found = shapes(1, page_size=20)
    assert named(TPU, found).attention == "reference"
    assert refusals(found, TPU)["attention"].startswith("page_size is 20; the TPU kernel supports multiples of 16")
    with pytest.raises(ValueError, match="--attention tpu cannot serve .*page_size is 20"):
        named(TPU, found, attention="tpu")


def test_shapes_that_the_cuda_kernels_do_not_support_are_refused() -> None:
    assert refusals(shapes(4)) == {}
    assert named(HOPPER, shapes(4, page_size=20)).all_reduce == "xla", "P2P was not measured beside XLA's attention"
    found = refusals(shapes(4, page_size=20))
    assert found.keys() == {"attention", "decode_layers"}
    assert all("page_size is 20" in reason for reason in found.values())


def test_layers_with_experts_are_fused_on_one_device() -> None:
    assert refusals(shapes(1, model=EXPERTS)) == {}
    refusal = "layers with experts are fused on one device only"
    assert refusals(shapes(8, model=EXPERTS)) == {"decode_layers": refusal}
    mixed = dataclasses.replace(EXPERTS, experts=dataclasses.replace(EXPERTS.experts, dense_layers=(0,)))
    assert "some layers" in refusals(shapes(1, model=mixed))["decode_layers"]
    thin = dataclasses.replace(EXPERTS, experts=dataclasses.replace(EXPERTS.experts, mlp_dim=720))
    found = refusals(shapes(1, model=thin))
    assert "attention" not in found and "720; a multiple of 32" in found["moe_backend"]


def test_fp8_experts_are_fused_too() -> None:
    fp8 = named_model("qwen3-30b-a3b", "fp8-block")
    assert refusals(shapes(1, model=fp8)) == {}
    assert "moe_backend" not in refusals(shapes(8, model=fp8))  # blocks of 128 rows are not cut
    wide = named_model("qwen3-coder-480b-a35b", "fp8-block")
    assert "moe_backend" not in refusals(shapes(8, model=wide))  # 6,144 columns
    assert wide.experts is not None
    wide = dataclasses.replace(wide, embed_dim=8320)
    assert "8320 columns; at most 8192" in refusals(shapes(8, model=wide))["moe_backend"]
    in_float32 = dataclasses.replace(shapes(1, model=fp8), dtype=jnp.dtype("float32"))
    assert "activations are float32" in refusals(in_float32)["moe_backend"]


@pytest.mark.parametrize(
    ("chip", "options", "expected"),
    [
        ("h200", {}, ("cuda", "off", "p2p", "cuda")),
        ("h200", {"moe_backend": "xla"}, ("cuda", "off", "p2p", "xla")),
        ("v6e", {"page_size": 128}, ("tpu", "off", "xla", "tpu")),
        ("cpu", {}, ("reference", "off", "xla", "xla")),
        ("cpu", {"moe_backend": "tpu_interpreted"}, ("reference", "off", "xla", "tpu_interpreted")),
    ],
)
def test_a_model_with_experts_on_two_devices_has_no_fused_layers(chip, options, expected) -> None:
    found = resolve_for(ServeConfig(**options), EXPERTS, chip=CHIPS[chip], num_devices=2).kernel_names
    assert (found.attention, found.decode_layers, found.all_reduce, found.moe_backend) == expected


# --- quantized weights and caches

FP8_MODEL, FP8 = named_model("qwen3-8b", "fp8-block"), "float8_e4m3fn"
INT4_MODEL = named_model("qwen3-8b", "int4")


def without_output(model: ModelConfig) -> ModelConfig:
    """Returns a quantized model whose output projection keeps the model's dtype."""
    assert model.quantization is not None
    parameters = model.quantization.parameters - {"layers.attention.out"}
    return dataclasses.replace(model, quantization=dataclasses.replace(model.quantization, parameters=parameters))


PARTLY = without_output(FP8_MODEL)
assert FP8_MODEL.quantization is not None
SCALED = dataclasses.replace(
    FP8_MODEL, quantization=dataclasses.replace(FP8_MODEL.quantization, has_kv_scales=True)
)  # the checkpoint has scales for an 8-bit cache


@pytest.mark.parametrize(
    ("model", "cache_dtype", "attention", "decode_layers", "products"),
    [
        (MODEL, "bfloat16", "cuda", "cuda", "xla"),
        (FP8_MODEL, "bfloat16", "cuda", "cuda", "cuda_fp8"),
        (named_model("qwen3-8b", "fp8-channel"), "bfloat16", "cuda", "cuda", "cuda_fp8"),
        (INT4_MODEL, "bfloat16", "cuda", "cuda", "xla"),
        (PARTLY, "bfloat16", "cuda", "off", "cuda_fp8"),  # attention does not see the weights
        (named_model("qwen3-8b", fp8_head=True), "bfloat16", "cuda", "cuda", "xla"),  # the head is outside the layers
        (MODEL, FP8, "cuda", "cuda", "xla"),
        (FP8_MODEL, FP8, "cuda", "cuda", "cuda_fp8"),
        (SCALED, FP8, "cuda", "off", "cuda_fp8"),
        (SCALED, "bfloat16", "cuda", "cuda", "cuda_fp8"),
        (MODEL, "float16", "reference", "off", "xla"),
    ],
    ids=["plain", "fp8", "channel", "int4", "partly", "head", "cache", "both", "scaled", "unused scales", "float16"],
)
def test_cuda_kernels_are_not_selected_for_what_they_do_not_support(
    model: ModelConfig, cache_dtype: str, attention: str, decode_layers: str, products: str
) -> None:
    found = named(HOPPER, shapes(1, model=model, cache_dtype=cache_dtype))
    assert (found.attention, found.decode_layers, found.linear) == (attention, decode_layers, products)


@pytest.mark.parametrize(
    ("model", "chip", "num_devices", "dequantize", "is_quantized"),
    [
        ("qwen3-0.6b", "h200", 1, "auto", False),
        ("qwen3-0.6b", "h200", 4, "auto", False),  # the same at any TP size
        ("qwen3-0.6b", "h200", 1, "never", True),
        ("qwen3-0.6b", "cpu", 1, "auto", True),
        ("qwen3-0.6b", "cpu", 1, "always", False),
        ("qwen3-1.7b", "h200", 1, "auto", True),  # layers of 96 MiB
        ("qwen3-30b-a3b", "h200", 1, "auto", True),
    ],
)
def test_layers_that_are_not_faster_quantized_are_dequantized(
    model: str, chip: str, num_devices: int, dequantize: str, is_quantized: bool
) -> None:
    config = ServeConfig(model=model, dequantize=dequantize)
    server = resolve_for(config, named_model(model, "fp8-block"), chip=CHIPS[chip], num_devices=num_devices)
    assert server.kernel_shapes.is_quantized == is_quantized
    assert server.model.quantization_name == ("" if is_quantized else "dequantized ") + "fp8-block-128x128"
    plain = resolve_for(ServeConfig(model=model), named_model(model), chip=CHIPS[chip], num_devices=num_devices)
    if not is_quantized:
        assert server.kernel_names == plain.kernel_names
        assert server.buckets == plain.buckets
        assert weight_bytes(server.model, server.layout, server.dtype) == weight_bytes(
            plain.model, plain.layout, plain.dtype
        )


def test_dequantized_layers_are_named_in_the_log_and_in_errors(caplog: pytest.LogCaptureFixture) -> None:
    model = served_model(ServeConfig(model="random", dequantize="always"), FP8_MODEL, "gpu")
    assert "layers: fp8-block-128x128 weights, dequantized to bfloat16 while they are" in selected(
        caplog, shapes(1, model=model)
    )
    with pytest.raises(ConfigError, match="--dequantize always: the weights of experts stay quantized"):
        served_model(ServeConfig(model="random", dequantize="always"), named_model("qwen3-30b-a3b", "fp8-block"), "gpu")


def test_embedding_models_keep_small_layers_quantized() -> None:
    """They compute long steps only, in which FP8 products are faster."""
    model = dataclasses.replace(named_model("qwen3-0.6b", "fp8-block"), pooling=EMBEDDING)
    assert served_model(ServeConfig(model="random"), model, "gpu") is model


def test_a_planned_server_multiplies_on_the_fp8_tensor_cores() -> None:
    names = [
        resolve_for(ServeConfig(**options), FP8_MODEL, chip=CHIPS[chip], num_devices=2).kernel_names.linear
        for chip, options in (("h200", {}), ("h200", {"linear": "xla"}), ("cpu", {}), ("v6e", {"page_size": 128}))
    ]
    assert names == ["cuda_fp8", "xla", "xla", "xla"]


def test_a_projection_whose_blocks_are_cut_is_left_to_xla(caplog: pytest.LogCaptureFixture) -> None:
    kernel_shapes = shapes(8, model=named_model("qwen3-4b", "fp8-block"))
    assert products_left_to_xla(named(HOPPER, kernel_shapes), kernel_shapes).keys() == {"down"}
    assert "linear" not in refusals(kernel_shapes)
    log = selected(caplog, kernel_shapes, linear="cuda_fp8")
    assert "cuda_fp8, which rounds activations to FP8 and multiplies on the FP8 tensor cores" in log
    assert "down: XLA multiplies with dequantized weights, which is slower: a scale covers 128 x 64 elements" in log


def selected(caplog: pytest.LogCaptureFixture, kernel_shapes: KernelShapes, **options: str) -> str:
    """Returns the log of the selection of kernels for a Hopper GPU."""
    found = name_kernels(ServeConfig(model="random", **options), HOPPER, kernel_shapes)
    with caplog.at_level(logging.INFO):
        log_kernels(*found, has_experts=False)
        log_quantization(found.names, kernel_shapes, max_fused_tokens(found.names, kernel_shapes))
    return caplog.text


def test_the_reason_is_logged_for_each_option(caplog: pytest.LogCaptureFixture) -> None:
    log = selected(caplog, shapes(1, model=PARTLY))
    assert "decode layers: off instead of cuda, which is slower: o is not quantized, but down is" in log
    log = selected(caplog, shapes(1, model=SCALED, cache_dtype=FP8))
    assert "decode layers: off instead of cuda, which is slower: the checkpoint has scales for the KV cache" in log
    assert "quantized weights: fp8-block-128x128; linear in all steps: cuda_fp8, which rounds" in log
    assert "linear: " not in log.replace("linear in", ""), "nothing kept it from serving"
    assert "KV cache: float8_e4m3fn, with" in log


@pytest.mark.parametrize(
    ("kernel_shapes", "options", "message"),
    [
        (
            shapes(1, model=SCALED, cache_dtype=FP8),
            {"decode_layers": "reference"},
            "the checkpoint has scales for the KV",
        ),
        (
            shapes(1, cache_dtype="float16"),
            {"attention": "cuda"},
            "--attention cuda cannot .*: the cache is float16",
        ),
        (
            shapes(1, model=without_output(INT4_MODEL)),
            {"decode_layers": "cuda"},
            "--decode-layers cuda cannot .*: o is not quantized, but down is",
        ),
        (
            shapes(1, model=named_model("qwen3-8b", "int4")),
            {"linear": "cuda_fp8"},
            "--linear cuda_fp8 cannot .*: int4 weights are dequantized",
        ),
    ],
    ids=["cache", "attention", "cuda", "linear"],
)
def test_named_kernels_that_cannot_serve_are_refused(
    kernel_shapes: KernelShapes, options: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=message):
        selected(caplog, kernel_shapes, **options)


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-channel", "int4"])
@pytest.mark.parametrize("size", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"])
def test_the_fused_layers_take_quantized_weights_of_every_size(size: str, scheme: str) -> None:
    model = named_model(size, scheme)
    for num_devices in (1, 2, 4, 8):
        assert "decode_layers" not in refusals(shapes(num_devices, model=model))


def test_the_log_says_which_steps_dequantize(caplog: pytest.LogCaptureFixture) -> None:
    log = selected(caplog, shapes(1, model=INT4_MODEL))
    assert "linear: xla instead of cuda_fp8, which is slower: int4 weights are dequantized" in log
    assert "decode steps of up to 128 tokens multiply them in the fused layers" in log
    assert "linear in other steps: xla, which dequantizes" in log


def test_layers_that_stay_in_the_l2_cache_are_told_by_their_quantized_bytes() -> None:
    def most(size: str, scheme: str) -> int:
        kernel_shapes = shapes(1, model=named_model(size, scheme))
        return max_fused_tokens(named(HOPPER, kernel_shapes, linear="xla"), kernel_shapes)

    # Larger steps of FP8 weights have other kernels: see the next test.
    assert [most("qwen3-1.7b", scheme) for scheme in ("none", "fp8-block", "int4")] == [64, 64, 256]
    assert [most("qwen3-8b", scheme) for scheme in ("none", "fp8-block", "int4")] == [64, 64, 128]


def test_larger_decodes_with_block_scaled_fp8_weights_run_on_fused_layers_on_one_device() -> None:
    def most(size: str, scheme: str = "fp8-block", num_devices: int = 1, **options: object) -> int:
        has_drafts = bool(options.pop("has_drafts", False))
        model = named_model(size, scheme)
        kernel_shapes = dataclasses.replace(shapes(num_devices, model=model), has_drafts=has_drafts)
        return max_fused_tokens(named(HOPPER, kernel_shapes, **options), kernel_shapes)

    assert most("qwen3-1.7b") == most("qwen3-8b") == 256
    assert most("qwen3-8b", num_devices=2) == most("qwen3-8b", has_drafts=True) == most("qwen3-8b", linear="xla") == 64
    assert most("qwen3-8b", "fp8-channel") == 64
    assert most("qwen3-30b-a3b") == 128


def test_small_steps_with_prompts_run_on_fused_layers_if_those_are_dense_and_on_one_device() -> None:
    def most(size: str, scheme: str = "none", num_devices: int = 1, pooling: Pooling | None = None, **known) -> int:
        model = dataclasses.replace(named_model(size, scheme), pooling=pooling)
        kernel_shapes = shapes(num_devices, model=model, **known)
        return max_fused_prompt_tokens(named(HOPPER, kernel_shapes), kernel_shapes)

    assert [most("qwen3-0.6b"), most("qwen3-0.6b", pooling=EMBEDDING), most("qwen3-8b")] == [128, 128, 64]
    assert most("qwen3-0.6b", num_devices=2) == most("qwen3-0.6b", "fp8-block") == 0
    assert most("qwen3-0.6b", cache_dtype=FP8) == 0


@pytest.mark.parametrize(
    ("capability", "is_kernel"), [((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True), ((12, 0), True)]
)
def test_the_sampling_kernel_serves_gpus_since_ampere(capability: tuple[int, int], is_kernel: bool) -> None:
    reason = sampling.IMPLEMENTATIONS["cuda"].unsupported_reason(Device("gpu", "a GPU", capability), 151_936)
    assert (reason is None) == is_kernel, reason
