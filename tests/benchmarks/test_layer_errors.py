"""Errors of layers with quantized weights: by how much each format differs from float32."""

import numpy as np
import pytest

from meshserve.benchmarks.checks import layer_errors
from meshserve.runtime.model_files.quantization import SCHEMES


def test_errors_are_those_of_the_formats_precision() -> None:
    """e4m3 has 3 bits of fraction, and numbers of 4 bits are three to five times as coarse. A layer adds errors up."""
    found = {
        scheme: layer_errors.measure(scheme, 256, 128, num_tokens=32, deviation=0.02, seed=1) for scheme in SCHEMES
    }
    for scheme, errors in found.items():
        low, high = (0.02, 0.03) if scheme.startswith("fp8") else (0.07, 0.13)
        assert low < errors.weights < high and low < errors.projection < high, errors
        assert errors.weights < errors.mlp < 3 * errors.weights
    assert found["nvfp4"].weights < found["mxfp4"].weights
    assert [round(found[scheme].bits, 3) for scheme in ("int4", "nvfp4", "mxfp4")] == [4.125, 4.5, 4.25]


def test_a_format_without_error_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_errors, "dequantized", lambda weights, scheme: (weights, 32.0))
    found = layer_errors.measure("int4", 64, 32, num_tokens=4, deviation=0.02, seed=1)
    assert (found.weights, found.projection, found.mlp) == (0.0, 0.0, 0.0)


def test_the_table_has_a_row_for_each_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    layer_errors.main(["--embed", "128", "--mlp", "128", "--tokens", "4"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(SCHEMES)
    assert np.array([[float(cell.rstrip(" %")) for cell in row.split(" | ")[2:4]] for row in rows]).all()
