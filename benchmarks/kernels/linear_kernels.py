"""Times the products of a layer on one device's block, plain or quantised, and can check their results.

    python -m meshserve.benchmarks.kernels.linear_kernels --model qwen3-8b --tokens 128 4096
    python -m meshserve.benchmarks.kernels.linear_kernels --tp 4 --quantize fp8-channel --backend cuda_fp8 xla --check

Every figure is measured over a sequence of calls that the device runs without waiting for the host, each of every layer
of a stack; median, P10 and P90 are over such sequences. The operation before a product (a norm, SiLU) is included.
TFLOP/s counts the product alone, GB/s the weights. `--check` prints the norm of the error over that of the result,
against float32 products of dequantised weights and, for implementations that round activations, rounded activations.
Take `--plain` for it: an operation before may differ by one step of bfloat16, which changes the rounding to FP8 after
it and makes errors of 1e-2 to 3e-2.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.timing import random_array, timed_ms
from meshserve.kernels.linear import (
    FP8,
    IMPLEMENTATIONS,
    Matrix,
    Prologue,
    QuantisedMatrix,
    RMSNorm,
    implementation,
    quantised_activations,
    silu_product,
)
from meshserve.runtime.api.quantisation import NOT_QUANTIZED, SCHEMES
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.mesh import make_mesh

PROJECTIONS = ("qkv", "o", "gate_up", "down")
_INT4_GROUP = 128
_ROUNDING = ("xla_fp8", "cuda_fp8")  # implementations that round activations


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints a line for each projection, number of tokens and implementation."""
    options = _parser().parse_args(arguments)
    results = []
    for num_tokens in options.tokens:
        for projection in options.projections:
            for name in options.backend:
                results.append(measure(options, projection, num_tokens, name))
                print(_row(options, results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="linear_kernels", description="Time the products of a layer.")
    parser.add_argument("--model", default="qwen3-8b", help="a published size (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096], help="tokens of a step")
    parser.add_argument("--projections", nargs="+", choices=PROJECTIONS, default=PROJECTIONS)
    parser.add_argument("--quantize", default="fp8-block", choices=(NOT_QUANTIZED, *SCHEMES))
    parser.add_argument("--backend", nargs="+", choices=IMPLEMENTATIONS, default=["xla"])
    parser.add_argument(
        "--candidate", type=int, help="which of cuBLASLt's algorithms cuda_fp8 uses; 0 is its first choice"
    )
    parser.add_argument("--tp", type=int, default=1, help="number of devices, of which one is measured")
    parser.add_argument("--layers", type=int, default=6, help="layers in the stack (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="leave out the operation before each product")
    parser.add_argument("--check", action="store_true", help="compare with float32 products")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure")
    parser.add_argument("--json", type=Path)
    return parser


def _row(options: argparse.Namespace, result: dict[str, float | str]) -> str:
    error = f", error {result['error']:.1e}" if options.check else ""
    return (
        f"{options.model} tp {options.tp} {options.quantize:11} {result['backend']:9} {result['projection']:7} "
        f"{result['tokens']:5} tokens: {result['us']:8.1f} us (P10 {result['p10']:.1f}, P90 {result['p90']:.1f}), "
        f"{result['tflops']:6.1f} TFLOP/s, {result['gb_per_second']:6.0f} GB/s{error}"
    )


def shape_of(options: argparse.Namespace, projection: str) -> tuple[int, int]:
    """Returns the rows and columns of a projection on one device."""
    model = named_model(options.model)
    layout, tp = model_layout(model, options.tp), options.tp
    embed, mlp = model.embed_dim, layout.mlp_dim // tp
    groups, heads = layout.num_groups // tp, model.num_query_heads // tp
    rows_of_group = (heads // groups + 2) * model.head_dim
    return {
        "qkv": (groups * rows_of_group, embed),
        "o": (embed, heads * model.head_dim),
        "gate_up": (2 * mlp, embed),
        "down": (embed, mlp),
    }[projection]


def random_weights(scheme: str, num_layers: int, rows: int, columns: int) -> Matrix:
    """Returns a stack [layers, rows, columns] with random numbers, and random scales if it is quantised."""
    if scheme == NOT_QUANTIZED:
        return random_array((num_layers, rows, columns), 0)
    block = {"fp8-block": (128, 128), "fp8-channel": (1, columns), "int4": (1, _INT4_GROUP)}[scheme]
    scale = jax.random.uniform(
        jax.random.key(1), (num_layers, rows // block[0], columns // block[1]), minval=0.5e-3, maxval=2e-3
    )
    if scheme == "int4":
        data = jax.random.bits(jax.random.key(2), (num_layers, rows, columns // 2), jnp.uint8)
    else:
        make = jax.jit(lambda: (jax.random.normal(jax.random.key(2), (num_layers, rows, columns)) * 20).astype(FP8))
        data = make()
    return QuantisedMatrix(data, scale)


def prologue_of(options: argparse.Namespace, projection: str, columns: int) -> Prologue | None:
    """Returns the operation that the model has before a projection."""
    if options.plain or projection == "o":
        return None
    return silu_product if projection == "down" else RMSNorm(random_array((columns,), 4) * 32, 1e-6)


def measure(options: argparse.Namespace, projection: str, num_tokens: int, name: str) -> dict[str, float | str]:
    """Returns the figures of one implementation for one projection and number of tokens."""
    rows, columns = shape_of(options, projection)
    weights = random_weights(options.quantize, options.layers, rows, columns)
    prologue = prologue_of(options, projection, columns)
    x = random_array((num_tokens, (2 if prologue is silu_product else 1) * columns), 3) * 32
    product: Callable[..., jax.Array] = implementation(name)
    if name == "cuda_fp8":
        product = partial(product, candidate=options.candidate)

    def products(weights: Matrix, x: jax.Array) -> list[jax.Array]:
        layers = [jax.tree.map(lambda stack, layer=layer: stack[layer], weights) for layer in range(options.layers)]
        return [product(x, layer, prologue=prologue) for layer in layers]

    settings = compiler_options(make_mesh(1), has_library_gemms=True)
    program = jax.jit(products).lower(weights, x).compile(compiler_options=settings)
    figures, found = timed_ms(lambda _: program(weights, x), None, options.layers, options.rounds, options.seconds)
    us, p10, p90 = (1e3 * float(np.percentile(figures, rank)) for rank in (50, 10, 90))
    error = (
        _error(found[-1], x, jax.tree.map(lambda stack: stack[-1], weights), prologue, name) if options.check else 0.0
    )
    return {
        "projection": projection, "tokens": num_tokens, "backend": name, "us": us, "p10": p10, "p90": p90,
        "tflops": 2e-6 * num_tokens * rows * columns / us, "error": error,
        "gb_per_second": sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / options.layers / us / 1e3,
    }  # fmt: skip


def _error(found: jax.Array, x: jax.Array, weight: Matrix, prologue: Prologue | None, name: str) -> float:
    """Returns the norm of the error over that of the float32 product."""

    def expected(x: jax.Array, weight: Matrix) -> jax.Array:
        x = x if prologue is None else prologue(x)
        if name in _ROUNDING and isinstance(weight, QuantisedMatrix) and not weight.is_int4:
            numbers, scale = quantised_activations(x, weight.block[1])
            wide = numbers.astype(jnp.float32).reshape(*scale.shape, -1) * scale[..., None]
            x = wide.reshape(x.shape)
        return implementation("reference")(x, weight, out_dtype=jnp.dtype("float32"))

    right = expected(x, weight)
    return float(jnp.linalg.norm(found.astype(jnp.float32) - right) / jnp.linalg.norm(right))


if __name__ == "__main__":
    raise SystemExit(main())
