"""Tests `meshserve bench kernels` on small shapes: every operation, its shapes, its checks and its output."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshserve.benchmarks.kernels import attention, call, experts, kernels, linear, p2p
from meshserve.kernels.implementation import Cost
from meshserve.runtime.resolve.kernel_shapes import KernelShapes
from meshserve.runtime.weights import registry
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS

Run = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the benchmark and returns its rows, after checking that each was printed."""

    def run(arguments: str) -> list[dict[str, Any]]:
        target = tmp_path / "rows.json"
        assert kernels.main([*arguments.split(), *f"--rounds 1 --seconds 0.01 --json {target}".split()]) == 0
        rows = json.loads(target.read_text())
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + len(rows)
        for row, line in zip(rows, lines[2:], strict=True):
            assert line.startswith(row["case"]) and row["us"] > 0 and row["shape"]["name"] == row["case"]
        return rows

    return run


@pytest.fixture
def few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the benchmark's model one of 16 small experts."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
    raw = {**registry.published_config("qwen3-30b-a3b"), **sizes}
    monkeypatch.setattr(call, "named_model", lambda _: registry.model_config(raw))


def test_attention_of_steps_of_a_model(run: Run):
    shape = "--model qwen3-0.6b --tp 4 --page-size 16 --cache-gigabytes 1e-6 --steps 1x3/20 5x1/33+1x2/16"
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 1e-2)):
        rows = run(f"--op attention {shape} --dtype {dtype} --check")
        assert [row["case"] for row in rows] == ["qwen3-0.6b tp 4 1x3/20", "qwen3-0.6b tp 4 5x1/33+1x2/16"]
        assert {row["implementation"] for row in rows} == {"reference"}, "which is alone here"
        assert all(row["error"] < bound and row["roofline_share"] is None for row in rows)
        assert all(row["gb_per_second"] > 0 < row["tflops"] for row in rows)
    assert rows[1]["shape"]["requests"] == [[5, 33], [1, 16], [1, 16]]


def test_steps_are_counted_under_the_causal_mask():
    assert attention.requests_of("4096") == ((4096, 4096),)
    assert attention.requests_of("1x2/9+3x1/8") == ((1, 9), (1, 9), (3, 8))
    step = attention.attention_step(attention.Case(name="", requests=attention.requests_of("2x3/5+6")))
    # The first of two new tokens attends to 4 keys, the second to 5; those of the other request to 1 to 6.
    assert step == (2 * 3 + 6, 3 * 5 + 6, 3 * (4 + 5) + 21, 6)


def test_cases_of_the_tests_are_timed_by_name(run: Run):
    assert {row["case"] for row in run("--op attention --case padding fp8-cache")} == {"padding", "fp8-cache"}
    assert len(run("--op decode_layers --case one-to* experts-padding")) == 2
    assert len(run("--op experts --case fp8 a-block-*")) == 3
    assert len(run("--op linear --case int4-64-zero --implementation xla")) == 1
    with pytest.raises(SystemExit, match="matches none of the cases one-token, top-1"):
        run("--op experts --case nothing")


def test_layers_and_their_projections(run: Run):
    model = "--op decode_layers --model qwen3-0.6b --tp 8 --layers 1 --dtype float32 --check"
    [row] = run(f"{model} --steps 1x2/40+1x1/100")
    assert row["shape"]["lengths"] == [40, 40, 100] and row["shape"]["num_layers"] == 1 and row["error"] < 1e-6
    rows = run(f"{model} --steps 1x2/40 --weights fp8-block --projections o down")
    assert [row["case"].split()[-2:] for row in rows] == [["fp8-block", "o"], ["fp8-block", "down"]]
    with pytest.raises(SystemExit, match="a decode step has one new token for each request"):
        run(f"{model} --steps 7")


def test_experts_and_skewed_routing(run: Run, few_experts: None):
    rows = run("--op experts --dtype float32 --tokens 1 40 --implementation xla reference --layers 1 --check")
    names = [(row["shape"]["num_tokens"], row["implementation"]) for row in rows]
    assert names == [(1, "xla"), (1, "reference"), (40, "xla"), (40, "reference")]
    assert all(row["error"] < 1e-6 for row in rows)
    options = argparse.Namespace(
        case=None, model="", tp=4, weights="bfloat16", expert_parallel=True, skew=2.0, layers=1, dtype="float32",
        tokens=[64], tune={},
    )  # fmt: skip
    [skewed] = experts.cases(options)
    assert skewed.num_local == 4 and "by expert skew 2" in skewed.name
    options.skew = 0.0
    even, first = (experts.call(options, case, "xla").cost.operations for case in (*experts.cases(options), skewed))
    assert first > 1.2 * even, "the first experts are chosen more often, and lie on this device"


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_the_shapes_of_products_are_those_of_the_model_on_a_device(tp: int):
    model, dtype = named_model("qwen3-8b"), jnp.dtype("bfloat16")
    shapes = KernelShapes(model=model, layout=model_layout(model, tp), dtype=dtype, cache_dtype=dtype, page_size=32)
    weights = shapes.layers
    assert weights is not None
    for projection in linear.PROJECTIONS:
        _, *rows, columns = getattr(weights, projection).shape
        options = argparse.Namespace(model="qwen3-8b", tp=tp)
        assert linear.shape_of(options, projection) == (math.prod(rows), columns)


@pytest.mark.parametrize("projection", linear.PROJECTIONS)
def test_products_are_compared_with_the_reference(run: Run, projection: str):
    product = f"--op linear --model qwen3-0.6b --tp 8 --tokens 3 --projections {projection} --layers 1 --plain --check"
    exact, rounded = run(f"{product} --weights fp8-block --implementation xla xla_fp8")
    assert exact["error"] < 0.01 < rounded["error"] < 0.05, "one rounds activations to FP8"


def test_all_reduces_are_timed_by_size(run: Run):
    rows = run("--op p2p --tp 2 4 --kilobytes 1 2")
    assert [(row["shape"]["tp"], row["shape"]["kilobytes"]) for row in rows] == [(2, 1.0), (2, 2.0), (4, 1.0), (4, 2.0)]
    assert {row["implementation"] for row in rows} == {"psum"}, "there is no P2P between CPU devices"


def test_every_sum_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "sums.json"
    options = f"--op p2p --tp 2 4 --kilobytes 1 2 --check-seconds 0.01 --json {file}".split()
    assert kernels.main(options) == 0
    rows = json.loads(file.read_text())
    assert [(row["tp"], row["implementation"], row["num_wrong"]) for row in rows] == [(2, "psum", 0), (4, "psum", 0)]
    assert all(row["num_sums"] >= 2000 for row in rows)
    monkeypatch.setattr(p2p, "all_reduce", lambda mesh, name: lambda x: jax.lax.psum(x, "tensor").at[3].add(0.25))
    monkeypatch.setattr(p2p, "IMPLEMENTATIONS", ("psum",))
    assert kernels.main(options) == 1
    rows = json.loads(file.read_text())
    assert all(row["num_wrong"] == row["tp"] * row["num_sums"] for row in rows)


def test_sampling_paths(run: Run):
    rows = run("--op sampling --tokens 2 --vocab 2000 --case greedy* top-p* penalties,?greedy*")
    assert [row["case"] for row in rows] == ["greedy 2", "top-p 2", "penalties, greedy 2"]


def test_a_named_implementation_that_cannot_run_is_said(capsys: pytest.CaptureFixture[str]):
    assert kernels.main("--op attention --steps 1x1/20 --implementation cuda --cache-gigabytes 0".split()) == 1
    assert "is not supported here: attention 'cuda' cannot run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        kernels.main("--op linear --implementation cuda".split())
    assert "linear has cuda_fp8, portable, xla, xla_fp8, reference" in capsys.readouterr().err


def test_the_roofline_is_what_takes_longest():
    chip = CHIPS["h200"]

    def least_seconds(link_bytes: float = 0.0, **cost: float) -> float:
        made = call.Call(run=lambda state: state, state=None, num_calls=1, cost=Cost(**cost), link_bytes=link_bytes)
        assert made.least_seconds(None) == 0.0
        return made.least_seconds(chip)

    assert least_seconds(num_bytes=4.8e9, operations=989e6, link_bytes=450e3) == pytest.approx(1e-3)
    assert least_seconds(fp8_operations=chip.fp8_flops_per_second) == pytest.approx(1.0)
    assert least_seconds(link_bytes=450e6) == pytest.approx(1e-3)
