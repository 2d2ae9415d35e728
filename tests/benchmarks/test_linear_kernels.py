"""Tests the benchmark of a layer's products."""

import argparse
import json
import math
from pathlib import Path

import jax.numpy as jnp
import pytest

from meshserve.benchmarks.kernels import linear_kernels
from meshserve.runtime.planning import kernel_selection
from meshserve.runtime.planning.kernel_selection import KernelShapes
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_the_shapes_are_those_of_the_model_on_a_device(tp: int) -> None:
    model, dtype = named_model("qwen3-8b"), jnp.dtype("bfloat16")
    layout = model_layout(model, tp)
    shapes = KernelShapes(model=model, layout=layout, dtype=dtype, cache_dtype=dtype, page_size=32)
    weights = kernel_selection._layer_shapes(shapes)
    assert weights is not None
    for projection in linear_kernels.PROJECTIONS:
        _, *rows, columns = getattr(weights, projection).shape
        options = argparse.Namespace(model="qwen3-8b", tp=tp)
        assert linear_kernels.shape_of(options, projection) == (math.prod(rows), columns)


@pytest.mark.parametrize("projection", linear_kernels.PROJECTIONS)
def test_results_are_checked(projection: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = f"--model qwen3-0.6b --tp 8 --tokens 3 --projections {projection} --backend xla_fp8 --plain --check"
    linear_kernels.main([*arguments.split(), *f"--layers 1 --rounds 1 --seconds 0.01 --json {figures}".split()])
    (result,) = json.loads(figures.read_text())
    assert result["error"] < 0.01, "with activations that are not rounded, it is 0.03"
    assert result["tflops"] > 0
