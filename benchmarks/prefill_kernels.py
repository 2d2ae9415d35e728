"""Times attention alone at the shapes of prefill steps, on one GPU, beside cuDNN's.

    python -m meshserve.benchmarks.prefill_kernels --steps 1024x1 4096x1 2048x1/65536 1x256/1024 --attention cuda cudnn

A step NxB/C has B requests of N new tokens each and C tokens in all (without /C: no prefix); cuDNN, whose keys lie in
one piece, is asked for steps without a prefix alone. Every figure is of a row of calls that the device runs without
waiting for the host; the median, P10 and P90 are over such rows. TFLOP/s counts the products that a causal mask leaves:
four operations for each query head, element of a head, and key that a query sees. TB/s counts every key and value once.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.kernels.paged_attention import PagedBatch, implementation

from .timing import random_array, timed_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one call computes."""

    num_new: int  # tokens of each request
    num_requests: int
    context: int  # tokens of each request, the new ones included
    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @property
    def flops(self) -> float:
        seen = self.num_new * (self.context - self.num_new) + self.num_new * (self.num_new + 1) / 2
        return 4.0 * self.num_requests * seen * self.kv_heads * self.group * self.head_dim

    @property
    def page_bytes(self) -> int:
        return self.num_requests * self.context * self.kv_heads * self.head_dim * 4


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for num_new, num_requests, context in options.steps:
        step = Step(
            num_new=num_new,
            num_requests=num_requests,
            context=context,
            kv_heads=options.kv_heads,
            group=options.group,
            head_dim=options.head_dim,
            page_size=options.page_size,
        )
        for name in options.attention:
            if name != "cudnn" or step.num_new == step.context:
                _measure(step, name, options)
    return 0


def _measure(step: Step, name: str, options: argparse.Namespace) -> None:
    run = _cudnn(step, options.calls) if name == "cudnn" else _paged(step, name, options.calls)
    figures, _ = timed_ms(lambda _: run(), None, options.calls, options.rounds, options.seconds)
    ms, p10, p90 = (float(np.percentile(figures, rank)) for rank in (50, 10, 90))
    print(
        f"{name:9} {step.num_new:6d} new of {step.context:6d} x {step.num_requests:3d}: {ms:8.4f} ms (P10 {p10:.4f}, "
        f"P90 {p90:.4f}), {step.flops / ms / 1e9:6.1f} TFLOP/s, {step.page_bytes / ms / 1e9:5.2f} TB/s",
        flush=True,
    )


def _step(text: str) -> tuple[int, int, int]:
    shape, _, context = text.partition("/")
    num_new, _, num_requests = shape.partition("x")
    return int(num_new), int(num_requests or 1), int(context or num_new)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefill_kernels", description="Time attention of prefill steps.")
    parser.add_argument("--steps", type=_step, nargs="+", default=[(4096, 1, 4096)], metavar="NxB/C")
    parser.add_argument("--attention", nargs="+", default=["cuda", "cudnn"])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--calls", type=int, default=8, help="of a row")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of each figure")
    return parser


def _queries(num_calls: int, *shape: int) -> list[jax.Array]:
    return [random_array(shape, 10 + call) * 32 for call in range(num_calls)]


def _paged(step: Step, name: str, num_calls: int) -> Callable[[], list[jax.Array]]:
    """A row of calls. The pages of all requests lie mixed up."""
    attend = implementation(name)
    num_pages = -(-step.context // step.page_size)
    table = np.random.default_rng(0).permutation(step.num_requests * num_pages).reshape(step.num_requests, num_pages)
    positions = np.tile(np.arange(step.context - step.num_new, step.context), step.num_requests)
    token_request = np.repeat(np.arange(step.num_requests), step.num_new)
    batch = PagedBatch(*(jnp.asarray(array, jnp.int32) for array in (positions, token_request, table)))
    cache = random_array((1, table.size, step.kv_heads, 2, step.page_size, step.head_dim), 1) * 32
    queries = _queries(num_calls, len(positions), step.kv_heads, step.group, step.head_dim)

    @jax.jit
    def run(queries: list[jax.Array], cache: jax.Array, batch: PagedBatch) -> list[jax.Array]:
        return [attend(q, cache, batch, layer=0, scale=step.head_dim**-0.5) for q in queries]

    return functools.partial(run, queries, cache, batch)


def _cudnn(step: Step, num_calls: int) -> Callable[[], list[jax.Array]]:
    queries = _queries(num_calls, step.num_requests, step.context, step.kv_heads * step.group, step.head_dim)
    k, v = (random_array((step.num_requests, step.context, step.kv_heads, step.head_dim), seed) * 32 for seed in (3, 4))

    @jax.jit
    def run(queries: list[jax.Array], k: jax.Array, v: jax.Array) -> list[jax.Array]:
        return [jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn") for q in queries]

    return functools.partial(run, queries, k, v)


if __name__ == "__main__":
    raise SystemExit(main())
