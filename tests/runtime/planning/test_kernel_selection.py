"""Tests which kernels "auto" selects, and what happens if they cannot be used."""

import dataclasses
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from meshserve.kernels.p2p import P2PGroup, check, reference
from meshserve.kernels.p2p import gpu as p2p_gpu
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.model_config import ModelConfig, Pooling
from meshserve.runtime.model.qwen3 import Kernels
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.planning import kernel_selection
from meshserve.runtime.planning.kernel_selection import (
    CudaRefusals,
    KernelNames,
    KernelSelection,
    KernelShapes,
    P2PFindings,
    has_quantised_weights,
    name_kernels,
    product_refusals,
    select_kernels,
    served_model,
    shape_refusals,
)
from meshserve.runtime.planning.memory_plan import weight_bytes
from meshserve.runtime.planning.resolved_server import resolve_for
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

MODEL = named_model("qwen3-8b")
EXPERTS = named_model("qwen3-30b-a3b")
EMBEDDING = Pooling(score_token_ids=None)


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


def named(*, platform: str = "gpu", num_devices: int = 4, refusal: str | None = None, **options: object) -> KernelNames:
    config = ServeConfig(model="random", **options)
    return name_kernels(config, platform=platform, num_devices=num_devices, cuda_refusals=CudaRefusals(*[refusal] * 4))


@pytest.mark.parametrize(
    ("case", "all_reduce"),
    [
        ({}, "p2p"),
        ({"num_devices": 2}, "p2p"),
        ({"num_devices": 1}, "xla"),
        ({"num_devices": 8}, "xla"),  # not measured
        ({"platform": "tpu"}, "xla"),
        ({"platform": "cpu"}, "xla"),
        ({"refusal": "no Hopper GPU"}, "xla"),
        ({"decode_layers": "off"}, "p2p"),
        ({"coordinator": "host:1"}, "xla"),
        ({"all_reduce": "xla"}, "xla"),
        ({"num_devices": 8, "all_reduce": "p2p"}, "p2p"),
    ],
    ids=str,
)
def test_gpus_of_one_process_with_our_kernels_use_p2p(case: dict[str, object], all_reduce: str) -> None:
    assert named(**case).all_reduce == all_reduce


def test_shapes_that_the_cuda_kernels_do_not_support_are_refused() -> None:
    assert shape_refusals(shapes(4)) == CudaRefusals()
    refusals = shape_refusals(shapes(4, page_size=20))
    assert all("page_size is 20" in (reason or "") for reason in (refusals.attention, refusals.decode_layers))
    assert refusals.linear is None


def test_layers_with_experts_are_fused_on_one_device() -> None:
    assert shape_refusals(shapes(1, model=EXPERTS)) == CudaRefusals()
    refusal = "layers with experts are fused on one device only"
    assert shape_refusals(shapes(8, model=EXPERTS)) == CudaRefusals(decode_layers=refusal)
    mixed = dataclasses.replace(EXPERTS, experts=dataclasses.replace(EXPERTS.experts, dense_layers=(0,)))
    assert "some layers" in (shape_refusals(shapes(1, model=mixed)).decode_layers or "")
    thin = dataclasses.replace(EXPERTS, experts=dataclasses.replace(EXPERTS.experts, mlp_dim=720))
    refusals = shape_refusals(shapes(1, model=thin))
    assert refusals.attention is None and "720; a multiple of 32" in (refusals.moe_backend or "")
    assert named(refusal="no Hopper GPU").moe_backend == "xla"


def test_fp8_experts_are_fused_too() -> None:
    fp8 = named_model("qwen3-30b-a3b", "fp8-block")
    assert shape_refusals(shapes(1, model=fp8)) == CudaRefusals()
    assert shape_refusals(shapes(8, model=fp8)).moe_backend is None  # blocks of 128 rows are not cut
    wide = named_model("qwen3-coder-480b-a35b", "fp8-block")
    assert shape_refusals(shapes(8, model=wide)).moe_backend is None  # 6,144 columns
    assert wide.experts is not None
    wide = dataclasses.replace(wide, embed_dim=8320)
    assert "8320 columns; at most 8192" in (shape_refusals(shapes(8, model=wide)).moe_backend or "")
    in_float32 = dataclasses.replace(shapes(1, model=fp8), dtype=jnp.dtype("float32"))
    assert "activations are float32" in (shape_refusals(in_float32).moe_backend or "")


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


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes CPU devices look like GPUs of one host with P2P access and right sums."""

    def open_group(_: str, devices: list[jax.Device]) -> P2PGroup:
        return P2PGroup(axis=TENSOR_AXIS, ordinals=tuple(range(len(devices))))

    monkeypatch.setattr(kernel_selection, "name_kernels", lambda config, **_: named())
    monkeypatch.setattr(kernel_selection.p2p_gpu, "open_p2p_group", open_group)
    monkeypatch.setattr(kernel_selection.p2p_gpu, "p2p_all_reduce", reference.p2p_all_reduce)
    monkeypatch.setattr(
        kernel_selection, "_kernels", lambda names, shapes, mesh, refusal, p2p: Kernels(attend=None, p2p=p2p)
    )
    return monkeypatch


def select(num_devices: int = 4, findings: P2PFindings | None = None) -> KernelSelection:
    config = ServeConfig(model="random", tp=num_devices)
    found = select_kernels(config, shapes(num_devices), make_mesh(num_devices), findings)
    assert (found.kernels.p2p is not None) == found.names.has_p2p
    return found


def test_gpus_without_p2p_access_use_xla(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> P2PGroup:
        raise p2p_gpu.P2PError("no peer access")

    host.setattr(kernel_selection.p2p_gpu, "open_p2p_group", refuse)
    with caplog.at_level(logging.WARNING):
        assert select().names.all_reduce == "xla"
    assert "the GPUs have no P2P access; using XLA's all-reduce, which is slower: no peer access" in caplog.text


def counting(tried: list[int]) -> Callable[..., int]:
    return lambda mesh, *_: tried.append(mesh.size) or 0


def test_sums_are_tested_at_startup_and_not_when_the_tp_size_changes(host: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    host.setattr(kernel_selection.check, "num_wrong_elements", counting(tried))
    first = select(4)
    second = select(2, first.findings)
    assert (first.names.all_reduce, second.names.all_reduce) == ("p2p", "p2p")
    assert tried == [4]
    assert second.findings == first.findings == P2PFindings()


def test_after_wrong_sums_every_tp_size_uses_xla(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def late(x: jax.Array, p2p: P2PGroup) -> jax.Array:
        return jax.numpy.where(jax.lax.axis_index(TENSOR_AXIS) == 2, x, reference.p2p_all_reduce(x, p2p))

    host.setattr(kernel_selection.p2p_gpu, "p2p_all_reduce", late)
    host.setattr(kernel_selection, "p2p_max_bytes", lambda num_devices: 256 << 10)  # a CPU sums 8 MiB in half a minute
    with caplog.at_level(logging.WARNING):
        found = select()
    assert found.names.all_reduce == "xla"
    assert "elements of sums were wrong" in caplog.text
    tried: list[int] = []
    host.setattr(kernel_selection.check, "num_wrong_elements", counting(tried))
    assert select(2, found.findings).names.all_reduce == "xla"
    assert select(2).names.all_reduce == "p2p", "nothing is remembered outside of the findings"
    assert tried == [2]


def test_gpus_that_stop_during_a_sum_end_the_startup_with_a_remedy(host: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    host.setattr(kernel_selection.check, "num_wrong_elements", stop)
    host.setattr(kernel_selection.p2p_gpu, "timeouts", lambda: "P2P timeout: GPU 0 waited for GPU 1")
    with pytest.raises(ConfigError, match="P2P timeout: GPU 0 waited for GPU 1. Start with --all-reduce xla."):
        select()


def test_the_reference_sums_are_right() -> None:
    p2p = P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1))
    assert check.num_wrong_elements(make_mesh(2), p2p, reference, max_bytes=1 << 20) == 0


# --- quantised weights and caches

FP8_MODEL, FP8 = named_model("qwen3-8b", "fp8-block"), "float8_e4m3fn"
INT4_MODEL = named_model("qwen3-8b", "int4")


def without_output(model: ModelConfig) -> ModelConfig:
    """Returns a quantised model whose output projection keeps the model's dtype."""
    assert model.quantisation is not None
    parameters = model.quantisation.parameters - {"layers.attention.out"}
    return dataclasses.replace(model, quantisation=dataclasses.replace(model.quantisation, parameters=parameters))


PARTLY = without_output(FP8_MODEL)
assert FP8_MODEL.quantisation is not None
SCALED = dataclasses.replace(
    FP8_MODEL, quantisation=dataclasses.replace(FP8_MODEL.quantisation, has_kv_scales=True)
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
    refusals = shape_refusals(shapes(1, model=model, cache_dtype=cache_dtype))
    found = name_kernels(
        ServeConfig(model="random"),
        platform="gpu",
        num_devices=1,
        cuda_refusals=refusals,
        has_quantised_weights=has_quantised_weights(model),
    )
    assert (found.attention, found.decode_layers, found.linear) == (attention, decode_layers, products)


@pytest.mark.parametrize(
    ("model", "chip", "num_devices", "dequantize", "is_quantised"),
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
def test_layers_that_are_not_faster_quantised_are_dequantised(
    model: str, chip: str, num_devices: int, dequantize: str, is_quantised: bool
) -> None:
    config = ServeConfig(model=model, dequantize=dequantize)
    server = resolve_for(config, named_model(model, "fp8-block"), chip=CHIPS[chip], num_devices=num_devices)
    assert has_quantised_weights(server.model) == is_quantised
    assert server.model.quantisation_name == ("" if is_quantised else "dequantised ") + "fp8-block-128x128"
    plain = resolve_for(ServeConfig(model=model), named_model(model), chip=CHIPS[chip], num_devices=num_devices)
    if not is_quantised:
        assert server.kernel_names == plain.kernel_names
        assert server.buckets == plain.buckets
        assert weight_bytes(server.model, server.layout, server.dtype) == weight_bytes(
            plain.model, plain.layout, plain.dtype
        )


def test_dequantised_layers_are_named_in_the_log_and_in_errors(caplog: pytest.LogCaptureFixture) -> None:
    model = served_model(ServeConfig(model="random", dequantize="always"), FP8_MODEL, "gpu")
    assert "layers: fp8-block-128x128 weights, dequantised to bfloat16 while they are" in selected(
        caplog, shapes(1, model=model)
    )
    with pytest.raises(ConfigError, match="--dequantize always: the weights of experts stay quantised"):
        served_model(ServeConfig(model="random", dequantize="always"), named_model("qwen3-30b-a3b", "fp8-block"), "gpu")


def test_embedding_models_keep_small_layers_quantised() -> None:
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
    refusals = product_refusals(kernel_shapes)
    assert [name for name, reason in refusals.items() if reason is not None] == ["down"]
    assert shape_refusals(kernel_shapes).linear is None
    log = selected(caplog, kernel_shapes, linear="cuda_fp8")
    assert "cuda_fp8, which rounds activations to FP8 and multiplies on the FP8 tensor cores" in log
    assert "down: XLA multiplies with dequantised weights, which is slower: a scale covers 128 x 64 elements" in log


def selected(caplog: pytest.LogCaptureFixture, kernel_shapes: KernelShapes, **options: str) -> str:
    """Returns the log of the selection of kernels on a CPU, with the refusals of a GPU."""
    names = name_kernels(
        ServeConfig(model="random", **options), platform="cpu", num_devices=1, cuda_refusals=CudaRefusals()
    )
    with caplog.at_level(logging.INFO):
        kernel_selection._kernels(names, kernel_shapes, make_mesh(1), shape_refusals(kernel_shapes), None)
    return caplog.text


def test_the_reason_is_logged_for_each_option(caplog: pytest.LogCaptureFixture) -> None:
    log = selected(caplog, shapes(1, model=PARTLY))
    assert "decode layers: off, which is slower than the CUDA kernels: o is not quantised, but down is" in log
    log = selected(caplog, shapes(1, model=SCALED, cache_dtype=FP8))
    slower = "which is slower than the CUDA kernels"
    assert f"decode layers: off, {slower}: the checkpoint has scales for the KV cache" in log
    assert "quantised weights: fp8-block-128x128; linear in all steps: xla, which dequantises" in log
    assert "linear: xla, which is slower" not in log, "it was not asked to be another"
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
            "--decode-layers cuda cannot .*: o is not quantised, but down is",
        ),
        (
            shapes(1, model=named_model("qwen3-8b", "int4")),
            {"linear": "cuda_fp8"},
            "--linear cuda_fp8 cannot .*: 4-bit weights are dequantised",
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
def test_the_fused_layers_take_quantised_weights_of_every_size(size: str, scheme: str) -> None:
    model = named_model(size, scheme)
    for num_devices in (1, 2, 4, 8):
        assert shape_refusals(shapes(num_devices, model=model)).decode_layers is None


def test_the_log_says_which_steps_dequantise(caplog: pytest.LogCaptureFixture) -> None:
    names = name_kernels(
        ServeConfig(model="random"), platform="gpu", num_devices=1, cuda_refusals=shape_refusals(shapes(1))
    )
    with caplog.at_level(logging.INFO):
        kernel_selection._log_quantisation(names, shapes(1, model=INT4_MODEL))
    assert "decode steps of up to 128 tokens multiply them in the fused layers" in caplog.text
    assert "linear in other steps: xla, which dequantises" in caplog.text


def test_layers_that_stay_in_the_l2_cache_are_told_by_their_quantised_bytes() -> None:
    def most(size: str, scheme: str) -> int:
        kernel_shapes = shapes(1, model=named_model(size, scheme))
        names = name_kernels(ServeConfig(model="random"), platform="gpu", num_devices=1, cuda_refusals=CudaRefusals())
        return kernel_selection.max_fused_tokens(names, kernel_shapes)

    assert [most("qwen3-1.7b", scheme) for scheme in ("none", "fp8-block", "int4")] == [64, 64, 256]
    assert [most("qwen3-8b", scheme) for scheme in ("none", "fp8-block", "int4")] == [64, 64, 128]


def test_larger_decodes_with_block_scaled_fp8_weights_run_on_fused_layers_on_one_device() -> None:
    def most(size: str, scheme: str = "fp8-block", num_devices: int = 1, **options: object) -> int:
        has_drafts = bool(options.pop("has_drafts", False))
        model = named_model(size, scheme)
        kernel_shapes = dataclasses.replace(shapes(num_devices, model=model), has_drafts=has_drafts)
        config = ServeConfig(model="random", **options)
        names = name_kernels(
            config, platform="gpu", num_devices=1, cuda_refusals=CudaRefusals(), has_quantised_weights=True
        )
        return kernel_selection.max_fused_tokens(names, kernel_shapes)

    assert most("qwen3-1.7b") == most("qwen3-8b") == 256
    assert most("qwen3-8b", num_devices=2) == most("qwen3-8b", has_drafts=True) == most("qwen3-8b", linear="xla") == 64
    assert most("qwen3-8b", "fp8-channel") == 64
    assert most("qwen3-30b-a3b") == 128


def test_small_steps_with_prompts_run_on_fused_layers_if_those_are_dense_and_on_one_device() -> None:
    def most(size: str, scheme: str = "none", num_devices: int = 1, pooling: Pooling | None = None, **known) -> int:
        model = dataclasses.replace(named_model(size, scheme), pooling=pooling)
        names = name_kernels(ServeConfig(model="random"), platform="gpu", num_devices=1, cuda_refusals=CudaRefusals())
        return kernel_selection.max_fused_prompt_tokens(names, shapes(num_devices, model=model, **known))

    assert [most("qwen3-0.6b"), most("qwen3-0.6b", pooling=EMBEDDING), most("qwen3-8b")] == [128, 128, 64]
    assert most("qwen3-0.6b", num_devices=2) == most("qwen3-0.6b", "fp8-block") == 0
    assert most("qwen3-0.6b", cache_dtype=FP8) == 0
