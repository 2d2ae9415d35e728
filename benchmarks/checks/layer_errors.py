"""Measures the error of layers with quantized weights against float32, on Gaussian weights, on the host.

    python -m meshserve.benchmarks.checks.layer_errors
    python -m meshserve.benchmarks.checks.layer_errors --embed 2048 --mlp 768 --deviation 0.03

The weights are quantized as `--quantize` does, dequantized and multiplied in float32; activations are not rounded. An
error is the norm of the difference over that of the result. Trained weights have outliers, which Gaussian ones lack:
this compares formats, and says little about models.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshserve.kernels.linear.formats import SCALE, TENSOR_SCALE
from meshserve.runtime.model_files.quantization import SCHEMES
from meshserve.runtime.weights.formats.quantize import made_quantization, quantized, tensor_scale


class LayerErrors(NamedTuple):
    """The errors of one format."""

    scheme: str
    bits: float  # of a weight, with its share of scales
    weights: float
    projection: float
    mlp: float


def dequantized(weights: np.ndarray, scheme: str) -> tuple[np.ndarray, float]:
    """Returns a matrix [N, K] after it has been quantized, in float32, and its bits a weight."""
    rows, columns = weights.shape
    quantization = made_quantization(scheme, [columns], "bfloat16")
    format, (row_block, column_block) = quantization.format, quantization.scale.block
    found = quantized(weights, quantization)
    wide = np.repeat(
        np.repeat(found.scale.astype(np.float32), row_block, axis=0)[:rows], column_block or columns, axis=1
    )
    grids = {SCALE: wide, TENSOR_SCALE: tensor_scale(weights)}
    elements = format.elements(format.unpack(found.data).astype(np.float32), grids)
    return elements, 8 * (found.data.nbytes + found.scale.nbytes) / weights.size


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def measure(scheme: str, embed: int, mlp: int, *, num_tokens: int, deviation: float, seed: int) -> LayerErrors:
    """Returns the errors of a scheme in an MLP of given sizes."""
    rng = np.random.default_rng(seed)
    shapes = {"gate": (mlp, embed), "up": (mlp, embed), "down": (embed, mlp)}
    weights = {name: (deviation * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    x = rng.standard_normal((num_tokens, embed)).astype(np.float32)
    made = {name: dequantized(matrix, scheme) for name, matrix in weights.items()}

    def layer(matrix: Callable[[str], np.ndarray]) -> np.ndarray:
        gate = x @ matrix("gate").T
        return (gate / (1 + np.exp(-gate)) * (x @ matrix("up").T)) @ matrix("down").T

    return LayerErrors(
        scheme=scheme,
        bits=made["gate"][1],
        weights=_error(made["gate"][0], weights["gate"]),
        projection=_error(x @ made["gate"][0].T, x @ weights["gate"].T),
        mlp=_error(layer(lambda name: made[name][0]), layer(weights.__getitem__)),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="meshserve bench layer_errors", description=__doc__.partition("\n")[0])
    parser.add_argument("--embed", type=int, default=4096, help="columns of gate and up")
    parser.add_argument("--mlp", type=int, default=2048, help="rows of gate and up")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens")
    parser.add_argument("--deviation", type=float, default=0.02, help="standard deviation of the weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    options = parser.parse_args(arguments)
    print("| | bits a weight | weights | projection | MLP |\n| --- | --- | --- | --- | --- |")
    for scheme in SCHEMES:
        found = measure(
            scheme, options.embed, options.mlp, num_tokens=options.tokens, deviation=options.deviation,
            seed=options.seed,
        )  # fmt: skip
        errors = " | ".join(f"{100 * error:.2f} %" for error in (found.weights, found.projection, found.mlp))
        print(f"| `{scheme}` | {found.bits:.3f} | {errors} |")


if __name__ == "__main__":
    main()
