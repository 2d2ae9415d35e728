"""Times attention alone at the shapes of prefill steps on one GPU, in comparison with cuDNN's.

    python -m meshserve.benchmarks.kernels.prefill_kernels --steps 1024x1 2048x1/65536 1x128/1024+1x1/32768

A step NxB/C has B requests with N new tokens each and C tokens in all (without /C there is no prefix); + adds further
requests. cuDNN needs contiguous keys, so it runs only steps of equal requests without a prefix. Every figure is
measured over a sequence of calls that the device runs without waiting for the host; median, P10 and P90 are over such
sequences. TFLOP/s counts the operations that remain under a causal mask: four for each query head, head element, and
key that a query sees. TB/s counts every key and value once.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.timing import random_array, timed_ms
from meshserve.kernels.paged_attention import PagedBatch, implementation


@dataclasses.dataclass(frozen=True)
class Requests:
    """A group of equal requests."""

    num_new: int  # tokens of each
    count: int
    context: int  # tokens of each, including the new ones

    @property
    def num_seen(self) -> float:
        """Number of (query token, key) pairs over all new tokens."""
        return self.count * (self.num_new * (self.context - self.num_new) + self.num_new * (self.num_new + 1) / 2)

    @classmethod
    def parse(cls, text: str) -> "Requests":
        shape, _, context = text.partition("/")
        num_new, _, count = shape.partition("x")
        return cls(int(num_new), int(count or 1), int(context or num_new))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The work of one call."""

    name: str
    requests: tuple[Requests, ...]
    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @property
    def flops(self) -> float:
        num_seen = sum(r.num_seen for r in self.requests)
        return 4.0 * num_seen * self.kv_heads * self.group * self.head_dim

    @property
    def page_bytes(self) -> int:
        return sum(r.count * r.context for r in self.requests) * self.kv_heads * self.head_dim * 4

    @property
    def is_dense(self) -> bool:
        """Whether cuDNN supports the step."""
        return len(self.requests) == 1 and self.requests[0].num_new == self.requests[0].context


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for text in options.steps:
        step = Step(
            name=text,
            requests=tuple(map(Requests.parse, text.split("+"))),
            kv_heads=options.kv_heads,
            group=options.group,
            head_dim=options.head_dim,
            page_size=options.page_size,
        )
        for name in options.attention:
            if name != "cudnn" or step.is_dense:
                _measure(step, name, options)
    return 0


def _measure(step: Step, name: str, options: argparse.Namespace) -> None:
    run = _cudnn(step, options.calls) if name == "cudnn" else _paged(step, name, options.calls)
    figures, _ = timed_ms(lambda _: run(), None, options.calls, options.rounds, options.seconds)
    ms, p10, p90 = (float(np.percentile(figures, rank)) for rank in (50, 10, 90))
    print(
        f"{name:9} {step.name:>24}: {ms:8.4f} ms (P10 {p10:.4f}, "
        f"P90 {p90:.4f}), {step.flops / ms / 1e9:6.1f} TFLOP/s, {step.page_bytes / ms / 1e9:5.2f} TB/s",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefill_kernels", description="Time the attention of prefill steps.")
    parser.add_argument("--steps", nargs="+", default=["4096"], metavar="NxB/C")
    parser.add_argument("--attention", nargs="+", default=["cuda", "cudnn"])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--calls", type=int, default=8, help="calls per sequence")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time per figure")
    return parser


def _queries(num_calls: int, *shape: int) -> list[jax.Array]:
    return [random_array(shape, 10 + call) * 32 for call in range(num_calls)]


def _paged(step: Step, name: str, num_calls: int) -> Callable[[], list[jax.Array]]:
    """Returns a function that runs a sequence of calls, with the pages of all requests in random order."""
    attend = implementation(name)
    each = [r for r in step.requests for _ in range(r.count)]
    num_pages = [-(-r.context // step.page_size) for r in each]
    table = np.zeros((len(each), max(num_pages)), int)
    table[np.arange(max(num_pages)) < np.array(num_pages)[:, None]] = np.random.default_rng(0).permutation(
        sum(num_pages)
    )
    positions = np.concatenate([np.arange(r.context - r.num_new, r.context) for r in each])
    token_request = np.repeat(np.arange(len(each)), [r.num_new for r in each])
    batch = PagedBatch(*(jnp.asarray(array, jnp.int32) for array in (positions, token_request, table)))
    cache = random_array((1, sum(num_pages), step.kv_heads, 2, step.page_size, step.head_dim), 1) * 32
    queries = _queries(num_calls, len(positions), step.kv_heads, step.group, step.head_dim)

    @jax.jit
    def run(queries: list[jax.Array], cache: jax.Array, batch: PagedBatch) -> list[jax.Array]:
        return [attend(q, cache, batch, layer=0, scale=step.head_dim**-0.5) for q in queries]

    return functools.partial(run, queries, cache, batch)


def _cudnn(step: Step, num_calls: int) -> Callable[[], list[jax.Array]]:
    (requests,) = step.requests
    shape = (requests.count, requests.context)
    queries = _queries(num_calls, *shape, step.kv_heads * step.group, step.head_dim)
    k, v = (random_array((*shape, step.kv_heads, step.head_dim), seed) * 32 for seed in (3, 4))

    @jax.jit
    def run(queries: list[jax.Array], k: jax.Array, v: jax.Array) -> list[jax.Array]:
        return [jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn") for q in queries]

    return functools.partial(run, queries, k, v)


if __name__ == "__main__":
    raise SystemExit(main())
