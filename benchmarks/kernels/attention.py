"""Attention over pages: `kernels.paged_attention`, and cuDNN's over contiguous keys for comparison.

A step NxB/C has B requests with N new tokens each and C tokens in all; without /C there is no prefix, and + adds more
requests. The calls of a program attend with queries of their own and cycle through layers, so that none finds its pages
in a cache of the hardware.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.random_arrays import random_array
from meshserve.kernels import paged_attention
from meshserve.kernels.paged_attention import AttentionShapes, AttentionStep, PagedBatch
from meshserve.kernels.paged_attention.cases import CASES, MATRIX_CASES, Case
from meshserve.kernels.paged_attention.contract import least_cost

from .call import Call, matching, sizes

IMPLEMENTATIONS = (*(name for name in paged_attention.IMPLEMENTATIONS if not name.endswith("_interpreted")), "cudnn")
_MAX_CALLS = 32


def add_options(group: Any) -> None:
    group.add_argument("--cache-gigabytes", type=float, default=8.0, help="size of the pages to cycle through")


def cases(options: argparse.Namespace) -> list[Case]:
    if options.case:
        return matching((*CASES, *MATRIX_CASES), options.case)
    model, layout = sizes(options)
    return [
        Case(
            name=f"{options.model} tp {options.tp} {step}",
            requests=requests_of(step),
            kv_heads=layout.num_groups // options.tp,
            group=layout.group_size,
            head_dim=model.head_dim,
            page_size=options.page_size,
            dtype=options.dtype,
            cache_dtype=options.kv_dtype,
            num_layers=options.layers,
        )
        for step in options.steps
    ]


def requests_of(step: str) -> tuple[tuple[int, int], ...]:
    """Returns the new tokens and all tokens of each request of a step such as 1x128/1024+512x1/2048."""
    requests: list[tuple[int, int]] = []
    for part in step.split("+"):
        shape, _, context = part.partition("/")
        num_new, _, count = shape.partition("x")
        requests += [(int(num_new), int(context or num_new))] * int(count or 1)
    return tuple(requests)


def attention_step(case: Case) -> AttentionStep:
    """Returns what a case asks of attention: the causal mask leaves a token those before it, and itself."""
    return AttentionStep(
        num_tokens=sum(new for new, _ in case.requests) + case.num_padding_tokens,
        num_keys=case.num_kv_tokens,
        num_pairs=sum(new * (total - new) + new * (new + 1) / 2 for new, total in case.requests),
        longest=max((total for _, total in case.requests), default=0),
    )


def call(options: argparse.Namespace, case: Case, name: str) -> Call:
    step = attention_step(case)
    shapes = AttentionShapes(
        kv_heads=case.kv_heads, group=case.group, head_dim=case.head_dim, page_size=case.page_size,
        dtype=jnp.dtype(case.dtype), cache_dtype=jnp.dtype(case.cache_dtype or case.dtype),
    )  # fmt: skip
    q_shape = (step.num_tokens, case.kv_heads, case.group, case.head_dim)
    layer_bytes = int(step.num_keys) * shapes.key_bytes + 4 * int(np.prod(q_shape))
    num_layers = case.num_layers or _num_layers(options, layer_bytes)
    make = _cudnn if name == "cudnn" else partial(_paged, name=name)
    attend, arrays = make(case, num_layers)
    queries = [random_array(q_shape, 10 + layer, case.dtype) * 32 for layer in range(num_layers)]

    @jax.jit
    def run(queries: list[jax.Array], arrays: Any) -> list[jax.Array]:
        return [attend(q, arrays, layer) for layer, q in enumerate(queries)]

    return Call(
        run=lambda _: run(queries, arrays),
        state=None,
        num_calls=num_layers,
        cost=(least_cost if name == "cudnn" else paged_attention.IMPLEMENTATIONS[name].cost)(shapes, step),
        result=None if name == "cudnn" else lambda: run(queries, arrays)[0],
    )


def _num_layers(options: argparse.Namespace, layer_bytes: int) -> int:
    return min(_MAX_CALLS, max(1, int(options.cache_gigabytes * 1e9 // max(layer_bytes, 1))))


Attend = Callable[[jax.Array, Any, int], jax.Array]


def _paged(case: Case, num_layers: int, name: str) -> tuple[Attend, Any]:
    """Returns the implementation over pages in random order, and what it reads."""
    implementation = paged_attention.implementation(name)
    batch, num_pages = paged_batch(case.requests, case.page_size, case.num_padding_tokens, case.num_padding_requests)
    shape = (num_layers, num_pages, case.kv_heads, 2, case.page_size, case.head_dim)
    cache = random_array(shape, 1, case.cache_dtype or case.dtype)
    scale = case.head_dim**-0.5

    def attend(q: jax.Array, arrays: tuple[jax.Array, PagedBatch], layer: int) -> jax.Array:
        return implementation(q, *arrays, layer=layer, scale=scale)

    return attend, (cache, batch)


def paged_batch(
    requests: Sequence[tuple[int, int]], page_size: int, num_padding_tokens: int = 0, num_padding_requests: int = 0
) -> tuple[PagedBatch, int]:
    """Returns a step of requests whose pages are in random order, and the number of pages."""
    counts = [-(-total // page_size) for _, total in requests]
    num_pages = max(1, sum(counts))
    table = np.zeros((len(requests) + num_padding_requests, max(1, *counts, 0)), np.int32)
    pages = np.random.default_rng(0).permutation(num_pages)
    for row, end in enumerate(np.cumsum(counts)):
        table[row, : counts[row]] = pages[end - counts[row] : end]
    positions = [np.arange(total - new, total) for new, total in requests]
    rows = np.repeat(np.arange(len(requests)), [new for new, _ in requests])
    padding = np.full(num_padding_tokens, -1)
    arrays = np.concatenate([*positions, padding]), np.concatenate([rows, 0 * padding]), table
    return PagedBatch(*(jnp.asarray(array, jnp.int32) for array in arrays)), num_pages


def _cudnn(case: Case, num_layers: int) -> tuple[Attend, Any]:
    """Returns cuDNN's attention and the keys and values of each layer."""
    num_new, num_tokens = case.requests[0] if case.requests else (0, 0)
    if set(case.requests) != {(num_new, num_tokens)} or num_new != num_tokens or jax.default_backend() != "gpu":
        raise ValueError("cuDNN attends on GPUs, to contiguous keys: equal requests without a prefix")
    shape = (num_layers, 2, len(case.requests), num_tokens, case.kv_heads, case.head_dim)

    def attend(q: jax.Array, keys_values: jax.Array, layer: int) -> jax.Array:
        q = q.reshape(len(case.requests), num_tokens, case.kv_heads * case.group, case.head_dim)
        k, v = keys_values[layer]
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    return attend, random_array(shape, 1, case.dtype)
