"""Times the experts of one layer on one device's block, with uniform or skewed routing.

    python -m meshserve.benchmarks.kernels.expert_kernels --model qwen3-30b-a3b --tokens 1 8 32 128
    python -m meshserve.benchmarks.kernels.expert_kernels --tp 8 --expert-parallel --tokens 512 --skew 1

Every figure is measured over a sequence of calls that the device runs without waiting for the host, each of another
layer of the stack; median, P10 and P90 are over such sequences. GB/s counts the weights of every expert that a token
chose once. Tokens choose experts independently, by a Zipf distribution of exponent `--skew`; 0 is uniform. A second
line tells how even the choices are: the busiest expert's tokens over the mean, and with `--expert-parallel` each
device's tokens.
"""

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.timing import random_array, timed_ms
from meshserve.kernels.experts import IMPLEMENTATIONS, ExpertWeights, Routing, default_name, implementation
from meshserve.kernels.experts.cases import Case, choices
from meshserve.kernels.linear import QuantisedMatrix
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints a line for each number of tokens and each implementation."""
    options = _parser().parse_args(arguments)
    platform = jax.devices()[0].platform
    results = []
    for num_tokens in options.tokens:
        for name in options.backend or [default_name(platform)]:
            result = measure(options, num_tokens, name)
            print(
                f"{options.model} tp {options.tp}{' by expert' if options.expert_parallel else ''} {name:16} "
                f"{num_tokens:5} tokens, {result['num_experts']:3} experts: {result['ms']:9.3f} ms "
                f"(P10 {result['p10']:.3f}, P90 {result['p90']:.3f}), {result['gb_per_second']:8.1f} GB/s, "
                f"compiled in {result['compile_seconds']:.1f} s",
                flush=True,
            )
            print(f"    {balance_text(result)}", flush=True)
            results.append(result)
    if options.json:
        options.json.write_text(json.dumps(results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="expert_kernels", description="Time the experts of one layer.")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a published size (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128], help="tokens of a step")
    parser.add_argument("--backend", nargs="*", choices=IMPLEMENTATIONS, help="default: the one that serves here")
    parser.add_argument("--tp", type=int, default=1, help="number of devices, of which one is measured")
    parser.add_argument("--expert-parallel", action="store_true", help="experts are split by expert")
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of the choices' Zipf distribution")
    parser.add_argument("--layers", type=int, default=2, help="layers in the stack (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--fp8", action="store_true", help="weights are 8-bit floats with scales for 128 x 128 of them")
    parser.add_argument(
        "--most-few-tokens",
        type=int,
        help="of cuda: steps of more tokens are computed in tiles, others by rows of weights where they can be",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure")
    parser.add_argument("--json", type=Path)
    return parser


def random_fp8(shape: tuple[int, ...], seed: int) -> QuantisedMatrix:
    """Returns random 8-bit weights with a scale for each 128 x 128 of them."""
    rows, columns = (size // 128 for size in shape[-2:])
    scale = jnp.full((*shape[:-2], rows, columns), 1 / 16, jnp.float32)
    _, bits = jax.lax.rng_bit_generator(jnp.array([seed, 1, 2, 3], jnp.uint32), shape, jnp.uint8)
    return QuantisedMatrix(jax.lax.bitcast_convert_type((bits & 0x87) | 0x28, jnp.float8_e4m3fn), scale)


def device_tokens(chosen: np.ndarray, num_experts: int, num_devices: int) -> list[int]:
    """Returns how many choices of experts each device computes if it holds every so many-th block of them."""
    block = -(-num_experts // num_devices)
    return np.bincount(chosen.ravel() // block, minlength=num_devices).tolist()


def balance_text(result: dict[str, Any]) -> str:
    """Returns a line about the balance of experts, and of devices that hold whole experts."""
    text = f"the busiest expert has {result['expert_imbalance']:.2f} times the mean"
    loads = result["device_tokens"]
    if len(loads) < 2:
        return text
    imbalance = max(loads) * len(loads) / max(1, sum(loads))
    return f"{text}; tokens of each device: {', '.join(map(str, loads))}, the busiest {imbalance:.2f} times the mean"


def measure(options: argparse.Namespace, num_tokens: int, name: str) -> dict[str, Any]:
    """Returns the figures of one implementation at one number of tokens."""
    model = named_model(options.model)
    layout = model_layout(model, options.tp, expert_parallel=options.expert_parallel).experts
    if model.experts is None or layout is None:
        raise SystemExit(f"{options.model} has no experts; take one of the mixture-of-experts sizes.")
    case = Case(
        name="",
        num_tokens=num_tokens,
        num_experts=model.experts.num_experts,
        num_chosen=model.experts.num_chosen,
        skew=options.skew,
    )
    local, mlp_dim, embed_dim = layout.block_experts, layout.block_mlp_dim, model.embed_dim
    chosen = choices(case, np.random.default_rng(0))
    shapes = ((options.layers, local, 2, mlp_dim, embed_dim), (options.layers, local, embed_dim, mlp_dim))
    make = random_fp8 if options.fp8 else partial(random_array, dtype=options.dtype)
    weights = ExpertWeights(*(make(shape, seed) for seed, shape in enumerate(shapes)))
    routing = Routing(jnp.asarray(chosen), jnp.full(chosen.shape, 1 / model.experts.num_chosen, jnp.float32))
    kernel: Any = implementation(name, jax.devices()[0])
    if options.most_few_tokens is not None:
        kernel = partial(kernel, most_few_tokens=options.most_few_tokens)

    def layers(weights: ExpertWeights, routing: Routing, x: jax.Array) -> jax.Array:
        for layer in range(options.layers):
            x += kernel(x, weights, routing, layer=layer, num_experts=case.num_experts)
        return x

    x = random_array((num_tokens, embed_dim), 2, options.dtype)
    lowered = jax.jit(layers).lower(weights, routing, x)
    started = time.perf_counter()
    program = lowered.compile()
    compile_seconds = time.perf_counter() - started
    figures, _ = timed_ms(partial(program, weights, routing), x, options.layers, options.rounds, options.seconds)
    num_read = len({expert for expert in chosen.ravel().tolist() if expert < local})
    num_bytes = num_read * 3 * mlp_dim * embed_dim * (1 if options.fp8 else x.dtype.itemsize)
    ms, p10, p90 = (float(np.percentile(figures, rank)) for rank in (50, 10, 90))
    num_choices = np.bincount(chosen.ravel(), minlength=case.num_experts)
    num_devices = options.tp if options.expert_parallel else 1
    return {
        "implementation": name, "skew": options.skew, "tokens": num_tokens,
        "num_experts": num_read, "ms": ms, "p10": p10, "p90": p90,
        "gb_per_second": num_bytes / ms / 1e6, "compile_seconds": compile_seconds,
        "expert_imbalance": float(num_choices.max() / num_choices.mean()),
        "device_tokens": device_tokens(chosen, case.num_experts, num_devices),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
