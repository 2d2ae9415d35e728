"""Tests the checks on programs compiled for GPUs without a GPU, and compiles a few programs of `make check-cuda`.

The compiling tests need jax's CUDA build: pip install "jax[cuda13]", or "jax[cuda13-local]" with a CUDA toolkit.
"""

import argparse
import dataclasses
import importlib.util
import math
import re

import pytest

from meshserve.benchmarks.checks import check_cuda, check_programs, check_tpu
from meshserve.kernels.cuda.build import find_nvcc
from meshserve.runtime.commands.cli import main
from meshserve.runtime.plan import compiled_plan, hlo
from meshserve.runtime.plan.aot import DryServer, ProgramReport
from meshserve.runtime.plan.compiled_plan import cache_that_fits, program_faults
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.program.batch import Bucket
from meshserve.runtime.resolve.resolved_server import ResolvedServer

HAS_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None and find_nvcc() is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="jax's CUDA build or nvcc is not installed")
CACHE_BYTES = 1 << 30


def server(target: str = "h100:1", kernels: str = "cuda", num_layers: int = 4) -> Planner:
    """Plans a server of Qwen3-8B with few layers."""
    plan = check_cuda.planner("qwen3-8b", target, kernels)
    return plan.replan(model=dataclasses.replace(plan.server.model, num_layers=num_layers))


def report(kind: str = "step", size: int = 64, **text: object) -> ProgramReport:
    """Returns a report as expected for `server()`."""
    counts = {"num_kernels": 4, "num_all_reduces": 0, "num_launches": 80, "num_recomputed": 0, "weight_copy_bytes": 0}
    return ProgramReport(
        kind=kind, size=size, cpu_seconds=1.0, argument_bytes=2 << 30, aliased_bytes=CACHE_BYTES, added_bytes=1 << 20,
        temp_bytes=1 << 20, peak_bytes=(2 << 30) + (1 << 20), code_bytes=0, num_weight_slices=0,
        text=hlo.ProgramText(**{**counts, "weight_copies": (), **text}),
    )  # fmt: skip


def faults(found: ProgramReport, plan: Planner | None = None) -> list[str]:
    return program_faults(plan or server(), found, CACHE_BYTES)


def test_a_program_of_which_everything_holds():
    assert faults(report()) == []


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (report(num_recomputed=3), "nothing is computed twice"),
        (report(weight_copies=("bf16[1,2,12288,4096] cut",)), "no weights are copied: bf16[1,2,12288,4096] cut"),
        (report(num_kernels=3), "it calls 4 kernels"),
        (report(num_all_reduces=31), "0 to 30 all-reduces"),
        (dataclasses.replace(report(), aliased_bytes=CACHE_BYTES - 1), "the KV cache is updated in place"),
        (dataclasses.replace(report(), temp_bytes=8 << 30), "temporaries stay below"),
        (dataclasses.replace(report(), peak_bytes=80 << 30), "it uses less than 74613 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_hold_is_named(found, fault):
    (only,) = faults(found)
    assert only.startswith(f"step 64: failed: {fault}")


@pytest.mark.parametrize(
    ("target", "kernels", "kind", "size", "num_kernels"),
    [
        ("h100:1", "cuda", "decode greedy", 64, 1),  # all layers in one call
        ("h100:1", "cuda", "decode top_p", 64, 2),  # plus the search of the filters
        ("h100:1", "cuda", "decode greedy x 4", 64, 1),
        ("h100:1", "cuda", "decode top_p x 4", 64, 2),
        ("h100:1", "cuda", "decode top_p x 4", 8, 2),
        ("h100:1", "cuda", "decode greedy x 4", 8, 4),  # without a loop
        ("h100:1", "cuda", "decode x 4", 128, 9),  # more requests than the fused layers support
        ("h100:1", "cuda", "step", 64, 4),  # all layers but the last, its two, and the search
        ("h100:1", "cuda", "step", 96, 9),  # attention and the search
        ("h100:1", "cuda", "sample", 64, 1),
        ("h100:1", "cuda", "prompt", 64, 0),
        ("h200:4", "cuda", "decode greedy", 64, 3),  # the embedding's all-reduce, all layers, the best tokens
        ("h200:4", "cuda", "step", 64, 18),  # heads, attention, two all-reduces per layer, and those two
        ("h200:4", "cuda", "step", 1024, 18),  # the largest that P2P serves
        ("h200:4", "cuda", "step", 2048, 10),  # all-reduces too large for P2P, except the last
        ("h200:4", "xla sums", "decode greedy", 64, 20),  # five calls per layer, split at the all-reduces
        ("h200:4", "xla sums", "step", 64, 8),
        ("h100:1", "xla", "step", 64, 0),
    ],
)
def test_the_number_of_kernels_follows_from_the_config(target, kernels, kind, size, num_kernels):
    plan = server(target, kernels)
    has_p2p = kernels == "cuda" and size <= 1024
    num_all_reduces = 9 if plan.server.tp > 1 and not has_p2p else 0
    right = report(kind, size, num_kernels=num_kernels, num_all_reduces=num_all_reduces)
    assert faults(right, plan) == []
    assert len(faults(dataclasses.replace(right, text=report(num_kernels=7).text), plan)) >= 1


@pytest.mark.parametrize(
    ("model", "quantize", "kind", "size", "num_kernels"),  # as compiled, with two layers
    [
        ("qwen3-8b", "fp8-block", "decode greedy", 64, 2),  # all layers, the output head
        ("qwen3-8b", "fp8-block", "step", 512, 14),  # four products a layer
        ("qwen3-8b", "fp8-block", "prompt", 64, 2),  # the last layer's MLP
        ("qwen3-30b-a3b", "fp8-block", "step", 512, 12),  # two products a layer, and its experts
        ("qwen3-30b-a3b", "fp8-block", "prompt", 64, 1),
        ("qwen3-8b", "int4", "step", 512, 6),
        ("qwen3-8b", "none", "step", 512, 6),
    ],
)
def test_calls_with_8_bit_weights_are_expected(model, quantize, kind, size, num_kernels):
    options = check_cuda.KERNELS["cuda"] | {"quantize": quantize, "fp8_head": True}
    plan = check_programs.planner(model, "h200:1", **options)
    plan = plan.replan(model=dataclasses.replace(plan.server.model, num_layers=2))
    assert faults(report(kind, size, num_kernels=num_kernels), plan) == []


def test_the_cache_that_fits_is_what_a_program_leaves():
    plan = server()
    num_pages = cache_that_fits(plan, report(), CACHE_BYTES)
    others = (1 << 30) + (1 << 20)  # arguments except the cache, and additions
    assert num_pages == (plan.limit_bytes - others) // plan.plan().page_bytes


def test_models_that_one_gpu_has_no_room_for_are_left_out():
    pairs = {
        (plan.name, plan.target.name) for plan in check_cuda.planned(*(check_cuda.MODELS, check_cuda.TARGETS), ["xla"])
    }
    assert ("qwen3-32b", "h200:4") in pairs
    assert ("qwen3-32b", "h200:1") not in pairs
    assert len(pairs) == 7


def test_only_decodes_are_no_server():
    with pytest.raises(
        SystemExit,
        match=r"selects no step that may hold prompts; add one of \[64, 96, 128, 192, 256",
    ):
        check_cuda.main(["--models", "qwen3-8b", "--targets", "h100:1", "--kernels", "cuda", "--tokens", "1", "8"])


@dataclasses.dataclass
class OneProgram:
    """Stands in for the programs of a server: one, which the compiler made to compute something twice."""

    buckets: list[Bucket]
    output_buffers: tuple = ()
    processors: None = None

    def to_lower(self):
        return {self.buckets[-1].key: None}


class OneProgramServer:
    """Stands in for `DryServer`."""

    def __init__(self, server: ResolvedServer):
        self._server = server

    def programs(self, shape):
        return OneProgram([self._server.buckets[-1]])

    def report(self, key, to_lower, known):
        return dataclasses.replace(report("set row", num_kernels=0, num_recomputed=9), aliased_bytes=1 << 40)

    def cache_bytes(self, shape) -> int:
        return CACHE_BYTES


@pytest.mark.parametrize(("num_layers", "is_left_out"), [(2, True), (36, False), (0, False)])
def test_few_layers_raise_no_false_alarm(num_layers, is_left_out, monkeypatch, capsys):
    monkeypatch.setattr(compiled_plan.DryServer, "on", lambda target, server: OneProgramServer(server))
    monkeypatch.setattr(compiled_plan, "largest_cache", lambda server, guess: guess)
    plan = check_tpu.planner("qwen3-8b", "v5e:2x4")
    options = argparse.Namespace(layers=num_layers, tokens=(), json=None)
    found = check_programs.check([plan], options)
    printed = capsys.readouterr().out
    assert ("not checked, because it needs all layers: nothing is computed twice" in printed) == is_left_out
    assert ("every other expectation holds" in printed) == is_left_out
    assert any("failed: nothing is computed twice" in fault for fault in found) != is_left_out
    assert len(found) == (0 if is_left_out else 1)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="jax's CUDA build is installed")
def test_without_the_compiler_the_command_says_what_brings_it(capsys):
    assert main(["plan", "--model=qwen3-8b", "--target=h100:1", "--compile"]) == 2
    error = capsys.readouterr().err
    assert "programs for NVIDIA H100 80GB HBM3 need XLA's CUDA compiler" in error
    assert "the extra [cuda], or, if nvcc and ptxas are on PATH, jax[cuda13-local]; neither needs a GPU" in error


@needs_compiler
@pytest.mark.parametrize("target", ["h100:1", "h200:4"])
@pytest.mark.parametrize("kernels", ["cuda", "xla sums", "xla"])
def test_a_step_and_a_decode_compile_in_place_with_their_kernels(target, kernels):
    plan = server(target, kernels, num_layers=2)
    shape = plan.server.cache_shape(plan.plan().served_pages)
    dry = DryServer.on(plan.target, plan.server)
    programs = dry.programs(shape).to_lower()
    others = (("decode greedy", 4), ("decode top_p", 4), ("decode greedy", 128), ("sample", 64), ("prompt", 64))
    for key in [("step", 64), *[key for key in others if key in programs]]:
        found = dry.report(key, programs[key])
        assert program_faults(plan, found, dry.cache_bytes(shape)) == []


@needs_compiler
@pytest.mark.parametrize(("size", "num_loops"), [(4, 0), (64, 1)])
def test_several_decode_steps_in_a_dispatch_choose_nothing_on_the_device(size, num_loops):
    plan = server(num_layers=2)
    plan = plan.replan(config=dataclasses.replace(plan.server.requested, max_decode_steps=4))
    shape = plan.server.cache_shape(plan.plan().served_pages)
    dry = DryServer.on(plan.target, plan.server)
    key = ("decode greedy x 4", size)
    found = dry.report(key, dry.programs(shape).to_lower()[key])
    assert program_faults(plan, found, dry.cache_bytes(shape)) == []
    (bucket,) = (bucket for bucket in plan.server.buckets if bucket.key == key)
    text = dry.compile(bucket, shape).as_text()
    assert text.count(" while(") == text.count('"known_trip_count":{"n":"4"}') == num_loops
    assert " conditional(" not in text


@needs_compiler
@pytest.mark.parametrize(("kind", "size"), [("decode greedy", 4), ("step", 64)])
def test_small_operands_have_no_room_in_the_memory_of_the_sampled_tokens(kind, size):
    """Otherwise the kernels of a call are set up again in every step."""
    plan = server(num_layers=2)
    dry = DryServer.on(plan.target, plan.server)
    bucket = next(bucket for bucket in plan.server.buckets if bucket.key == (kind, size))
    text = dry.compile(bucket, plan.server.cache_shape(1000)).as_text()
    calls = [line for line in text.splitlines() if re.search(r'"meshserve_(decode|prompt|prefill|qk)_\w+"', line)]
    assert len(calls) == (1 if bucket.is_decode else 3)
    for call in calls:
        shapes = [[int(size) for size in shape.split(",")] for shape in re.findall(r"s32\[([\d,]+)\]", call)]
        assert len(shapes) >= 2, "positions and the page table"
        assert min(map(math.prod, shapes)) > bucket.num_requests, call


@needs_compiler
def test_a_server_of_one_request_uses_library_gemms_too():
    """Otherwise XLA autotunes its own for every step size.

    The rows of the logits projection are padded, so that its table keeps its shape.
    """
    plan = server(num_layers=2)
    dry = DryServer.on(plan.target, plan.server)
    (bucket,) = (bucket for bucket in plan.server.buckets if bucket.key == ("step", 64))
    text = dry.compile(dataclasses.replace(bucket, num_requests=1), plan.server.cache_shape(1000)).as_text()
    assert len(re.findall(r"custom_call_target=\"__cublas", text)) == 4 + 1, "four of the last layer, and the head"
    assert "__triton_gemm" not in text
    assert "f32[151936,4096]" not in text


@needs_compiler
def test_products_of_the_library_read_weights_where_they_lie():
    """They also add the residual stream, which saves launches: how many depends on what XLA fuses with tuned ones."""
    launches = {}
    for products in ("tuned", "library"):
        plan = server(num_layers=2)
        plan = plan.replan(config=dataclasses.replace(plan.server.requested, gemm_backend=products))
        dry, shape = DryServer.on(plan.target, plan.server), plan.server.cache_shape(1000)
        key = plan.server.buckets[-1].key
        found = dry.report(key, dry.programs(shape).to_lower()[key])
        assert (found.text.weight_copies, found.text.num_recomputed) == ((), 0)
        launches[products] = found.text.num_launches
        alone = dataclasses.replace(plan.server.buckets[-1], num_requests=1)  # a head with one row
        assert not hlo.read(dry.compile(alone, shape).as_text()).weight_copies
    assert launches["library"] < launches["tuned"]


@needs_compiler
def test_a_server_with_p2p_compiles_too():
    plan = server("h200:4", num_layers=2)
    plan = plan.replan(config=dataclasses.replace(plan.server.requested, all_reduce="p2p"))
    dry = DryServer.on(plan.target, plan.server)
    key, shape = ("decode greedy", 4), plan.server.cache_shape(1000)
    found = dry.report(key, dry.programs(shape).to_lower()[key])
    assert found.text.num_all_reduces == 0
    assert found.text.num_kernels == 3  # the embedding's all-reduce, all layers, the best token
