"""Counts the VLIW bundles that the TPU compiler schedules for paged decode attention, for our kernel and for JAX's.

    python -m meshserve.benchmarks.checks.tpu_schedule

Needs and uses no TPU: libtpu compiles both kernels for one device of a v6e and dumps its final schedule. A bundle
issues in one cycle at best, so the number of bundles divided by the clock rate is the minimum time of a loop, without
waiting for memory. **This is a prediction, not a measurement.** The share of HBM bandwidth is the time to read the keys
and values divided by the larger of that time and the bundles' time, including the start and end of the kernel.

The shapes are those of one device of Qwen3-8B at TP size 8: 1 KV head, 4 query heads, 64 requests, pages of 128 tokens.
"""

import argparse
import dataclasses
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch, tpu
from meshserve.sharding.chips import target

TARGET = "v6e:2x4"
CLOCK_HZ = 1.75e9  # assumed, because libtpu does not report it
REQUESTS, GROUP, HEAD_DIM, PAGE_SIZE, MAX_CONTEXT = 64, 4, 128, 128, 32_768
TOKEN_BYTES = 2 * HEAD_DIM * 2
CONTEXTS = (1024, 8192)
# (pages, queries) per block of JAX's kernel: its own choice for these shapes, and the best of those tried.
JAX_BLOCKS = ((128, 32), (8, 8), (64, 8))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A sequence of bundles at one loop depth."""

    depth: int
    bundles: int
    matrix_products: int


def loops(path: str) -> list[Loop]:
    """Returns the loops of a final schedule, in program order."""
    found: list[Loop] = []
    depth, bundles, products = 0, 0, 0
    for line_depth, is_start, line in _bundle_lines(path):
        if (line_depth != depth or is_start) and bundles:
            found.append(Loop(depth, bundles, products))
            bundles, products = 0, 0
        depth, bundles, products = line_depth, bundles + 1, products + line.count("vmatmul")
    return [*found, Loop(depth, bundles, products)]


def _bundle_lines(path: str) -> Iterator[tuple[int, bool, str]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            match = re.match(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:((?: ?>)*)\s*\{", line)
            if match:
                yield match[2].count(">"), match[1] in ("LH", "LB"), line


def compile_ours() -> None:
    def call(q: jax.Array, cache: jax.Array, positions: jax.Array, request: jax.Array, table: jax.Array) -> jax.Array:
        return tpu.paged_attention(q, cache, PagedBatch(positions, request, table), layer=0, scale=HEAD_DIM**-0.5)

    pages = MAX_CONTEXT // PAGE_SIZE
    tokens = ((REQUESTS,), jnp.int32)
    _compile(
        call,
        ((REQUESTS, 1, GROUP, HEAD_DIM), jnp.bfloat16),
        ((2, 4096, 1, 2, PAGE_SIZE, HEAD_DIM), jnp.bfloat16),
        tokens,
        tokens,
        ((REQUESTS, pages), jnp.int32),
    )


def compile_jax(block_pages: int, block_queries: int) -> None:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def call(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arrays,
            sm_scale=HEAD_DIM**-0.5,
            num_kv_pages_per_block=block_pages,
            num_queries_per_block=block_queries,
            vmem_limit_bytes=64 << 20,
        )

    _compile(
        call,
        ((REQUESTS, GROUP, HEAD_DIM), jnp.bfloat16),
        ((4096, PAGE_SIZE, 2, HEAD_DIM), jnp.bfloat16),
        ((REQUESTS,), jnp.int32),
        ((REQUESTS, MAX_CONTEXT // PAGE_SIZE), jnp.int32),
        ((REQUESTS + 1,), jnp.int32),
        ((1,), jnp.int32),
    )


def _compile(call: Any, *shapes: tuple[tuple[int, ...], Any]) -> None:
    jax.config.update("jax_platforms", "cpu")
    mesh = target(TARGET).mesh(1)
    everywhere = PartitionSpec()
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, everywhere)) for shape, dtype in shapes
    ]
    program = jax.shard_map(call, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    jax.jit(program).lower(*arguments).compile()


def schedule(*arguments: str) -> list[Loop]:
    """Compiles one kernel in a separate process, which dumps its schedule, and reads the dump."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "meshserve.benchmarks.checks.tpu_schedule", "--compile", *arguments]
        subprocess.run(command, env={**os.environ, "LIBTPU_INIT_ARGS": flags}, check=True, capture_output=True)
        (path,) = [
            path for path in glob.glob(f"{folder}/*attention*-final_bundles.txt") if "schedule-analysis" not in path
        ]
        return loops(path)


def predict(name: str, found: list[Loop], *, turn_tokens: int, context: int, is_per_request: bool) -> dict[str, Any]:
    """Predicts the bundles and times of a step.

    A turn of the main loop processes `turn_tokens` positions, of one request or of several.
    """
    main = next(loop for loop in found if loop.depth and loop.matrix_products)
    turns = REQUESTS * -(-context // turn_tokens) if is_per_request else -(-REQUESTS * context // turn_tokens)
    around = sum(loop.bundles for loop in found if not loop.depth)
    read_seconds = REQUESTS * context * TOKEN_BYTES / target(TARGET).chip.hbm_bytes_per_second
    issue_seconds = turns * main.bundles / CLOCK_HZ
    share = read_seconds / (max(read_seconds, issue_seconds) + around / CLOCK_HZ)
    return {
        "kernel": name,
        "context": context,
        "bundles_a_turn": main.bundles,
        "turns": turns,
        "bundles": turns * main.bundles,
        "bundles_around": around,
        "read_us": read_seconds * 1e6,
        "issue_us": issue_seconds * 1e6,
        "hbm_share": share,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predict paged decode attention on a v6e from static schedules.")
    parser.add_argument("--compile", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one line of JSON per row")
    namespace = parser.parse_args(arguments)
    if namespace.compile:
        compile_ours() if namespace.compile == ["ours"] else compile_jax(*map(int, namespace.compile))
        return 0
    ours = schedule("ours")
    tiling = tpu.default_tiling(num_tokens=REQUESTS, kv_heads=1, group=GROUP, page_size=PAGE_SIZE)
    turn_tokens = tiling.items * tiling.block_pages * PAGE_SIZE
    theirs = {blocks: schedule(*map(str, blocks)) for blocks in JAX_BLOCKS}
    for context in CONTEXTS:
        rows = [predict("ours", ours, turn_tokens=turn_tokens, context=context, is_per_request=False)]
        for (pages, queries), found in theirs.items():
            name = f"jax {pages}x{queries}"
            rows.append(predict(name, found, turn_tokens=pages * PAGE_SIZE, context=context, is_per_request=True))
        for row in rows:
            if namespace.json:
                print(json.dumps(row))
            else:
                print(
                    f"{row['kernel']:<12} context {context:>5}: {row['bundles_a_turn']:>6} bundles per turn, "
                    f"{row['turns']:>4} turns, {row['issue_us']:>7.1f} us to issue, {row['read_us']:>6.1f} us to read, "
                    f"{row['hbm_share']:.0%} of HBM bandwidth predicted"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
