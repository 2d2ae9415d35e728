"""Times every implementation of paged decode attention that runs on this machine, over shapes and types.

    meshserve bench kernels --batch 1 32 128 --context 1024 16384 --heads 8x4 --json kernels.json --plots plots

Each request has one token, all requests have the same context length, and pages are in random order. Latency is
measured over a sequence of calls that the device runs without waiting for the host. The calls cycle through layers, so
that no call finds its pages in a hardware cache. Bandwidth is the bytes of the pages, read once, divided by that time.
Memory is what the program needs in addition to its arguments. The error is ||out - expected|| / ||expected|| against
float64 on the host, for the first requests of the batch.

`--plots` needs matplotlib (the extra "plots") and draws latency.png, throughput.png, memory.png, speedup.png and
dashboard.png.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.timing import random_array, timed_ms
from meshserve.kernels import paged_attention
from meshserve.kernels.paged_attention import PagedAttention, PagedBatch

from . import kernel_plots
from .kernel_figures import YARDSTICK, Figure, Shape

_MAX_CALLS = 32
_CHECKED_REQUESTS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.implementation = options.implementation or _usable()
    figures = []
    for shape in _shapes(options):
        figures += _measure(shape, options)
    if not figures:
        print("no implementation supports these shapes on this machine")
        return 1
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=1))
    if options.plots:
        kernel_plots.draw(figures, options.plots)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in paged_attention.IMPLEMENTATIONS if name != "tpu_interpreted"]
    parser.add_argument("--implementation", nargs="+", choices=names, help="default: all that run on this machine")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--context", type=int, nargs="+", default=[1024, 8192], help="context length of every request, in tokens"
    )
    parser.add_argument(
        "--heads", nargs="+", default=["8x4"], help="KV heads x query heads per KV head (Qwen3-8B: 8x4)"
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    parser.add_argument("--page-size", type=int, nargs="+", default=[64])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time per figure")
    parser.add_argument("--cache-gigabytes", type=float, default=8.0, help="size of the pages to cycle through")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plots", type=Path, help="folder to draw the plots in")
    return parser


def _usable() -> list[str]:
    """Returns the implementations that run on this backend, except the interpreted one."""
    names = []
    for name in paged_attention.IMPLEMENTATIONS:
        with contextlib.suppress(ValueError):
            paged_attention.implementation(name)
            names.append(name)
    return [name for name in names if name != "tpu_interpreted"]


def _shapes(options: argparse.Namespace) -> Iterator[Shape]:
    for dtype, heads, head_dim, page_size, batch, context in itertools.product(
        options.dtype, options.heads, options.head_dim, options.page_size, options.batch, options.context
    ):
        kv_heads, group = (int(part) for part in heads.split("x"))
        yield Shape(
            batch=batch,
            context=context,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
        )


def _measure(shape: Shape, options: argparse.Namespace) -> list[Figure]:
    """Measures each implementation that supports this shape on this machine."""
    num_layers = max(1, int(options.cache_gigabytes * 1e9 // shape.page_bytes))
    num_layers = min(num_layers, _MAX_CALLS)
    num_pages = shape.batch * shape.pages_per_request
    cache_shape = (num_layers, num_pages, shape.kv_heads, 2, shape.page_size, shape.head_dim)
    cache = random_array(cache_shape, 1, shape.dtype)
    q = random_array((shape.batch, shape.kv_heads, shape.group, shape.head_dim), 2, shape.dtype) * 32
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(shape.batch, -1)
    positions = jnp.full((shape.batch,), shape.context - 1, jnp.int32)
    batch = PagedBatch(positions, jnp.arange(shape.batch, dtype=jnp.int32), jnp.asarray(table))
    expected = _expected(shape, q, cache, table)
    figures: list[Figure] = []
    for name in options.implementation:
        try:
            attend = paged_attention.implementation(name)
            figure = _figure(name, attend, shape, (q, cache, batch), expected, options)
        except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
            print(f"{name:10} {shape.label:38} is not supported here: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        if figures and figures[0].implementation == YARDSTICK:
            figure = dataclasses.replace(figure, speedup=figures[0].ms / figure.ms)
        print(figure.row(), flush=True)
        figures.append(figure)
    del cache
    gc.collect()  # frees the cache, most of the memory, before the next one is allocated
    return figures


def _figure(
    name: str,
    attend: PagedAttention,
    shape: Shape,
    inputs: tuple[jax.Array, jax.Array, PagedBatch],
    expected: np.ndarray,
    options: argparse.Namespace,
) -> Figure:
    q, cache, batch = inputs
    num_layers, scale = cache.shape[0], shape.head_dim**-0.5
    once = jax.jit(partial(attend, layer=0, scale=scale))
    out = np.asarray(once(q, cache, batch), np.float64)[: expected.shape[0]]
    temporary = once.lower(q, cache, batch).compile().memory_analysis()

    @jax.jit
    def run(q: jax.Array, cache: jax.Array) -> jax.Array:
        for layer in range(num_layers):
            q = attend(q, cache, batch, layer=layer, scale=scale)
        return q

    figures, _ = timed_ms(lambda q: run(q, cache), q, num_layers, options.rounds, options.seconds)
    median, p10, p90 = (float(np.percentile(figures, percent)) for percent in (50, 10, 90))
    return Figure(
        implementation=name,
        shape=shape,
        device=jax.devices()[0].device_kind,
        ms=median,
        ms_p10=p10,
        ms_p90=p90,
        terabytes_per_second=shape.page_bytes / median / 1e9,
        temporary_bytes=temporary.temp_size_in_bytes if temporary is not None else 0,
        error=float(np.linalg.norm(out - expected) / np.linalg.norm(expected)),
    )


def _expected(shape: Shape, q: jax.Array, cache: jax.Array, table: np.ndarray) -> np.ndarray:
    """Computes the attention of the first requests over layer 0 in float64 [B', K, G, H], on the host."""
    out = []
    for request in range(min(shape.batch, _CHECKED_REQUESTS)):
        pages = np.asarray(cache[0, table[request]], np.float64)  # [pages, K, 2, S, H]
        keys_values = pages.transpose(2, 1, 0, 3, 4).reshape(2, shape.kv_heads, -1, shape.head_dim)
        keys_values = keys_values[:, :, : shape.context]
        scores = np.einsum("kgh,knh->kgn", np.asarray(q[request], np.float64), keys_values[0]) * shape.head_dim**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out.append(np.einsum("kgn,knh->kgh", weights, keys_values[1]))
    return np.stack(out)


if __name__ == "__main__":
    raise SystemExit(main())
