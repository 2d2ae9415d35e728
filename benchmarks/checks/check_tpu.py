"""Compiles every program of the server for TPU slices, without having one, and checks the compiled code.

    make check-tpu
    python -m meshserve.benchmarks.checks.check_tpu --models qwen3-8b --targets v6e:2x4

For each model and slice, every declared program must compile and fit, update the KV cache in place, and contain the
expected kernels and all-reduces. The largest cache that compiles must be the one that `meshserve plan` predicts.
The programs of a weight update must compile, too (`reshard_programs`). Finally, the check compiles programs that cannot
fit: if the compiler accepts one of them, the check itself is broken.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from meshserve.kernels.paged_attention import tpu, tpu_write
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.plan.aot import DryServer, OutOfMemoryError
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.program.step import CacheShape

from . import check_programs, reshard_programs

MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b")
TARGETS = ("v5e:2x4", "v6e:2x4", "v6e:4x4", "v5p:2x2x2", "tpu7x:2x2x1")
# If no others are named, to save time.
_TARGETS_OF = {"qwen3-30b-a3b": ("v6e:2x4",), "qwen3-235b-a22b": ("v6e:4x4",)}
# Models that are planned as their FP8 checkpoints, whose blocks of rows are not cut: split by expert only.
_FP8_MODELS = frozenset({"qwen3-235b-a22b"})
PAGE_SIZE = 128  # tokens; on TPU, a copy of 64 KiB or more costs less than its scalar instructions


def planner(model: str, slice_name: str, **options: Any) -> Planner:
    """Plans a server of a published model size on a whole slice."""
    return check_programs.planner(model, slice_name, page_size=PAGE_SIZE, **options)


def planned(models: Sequence[str], slice_name: str, *, is_default: bool) -> Iterator[Planner]:
    """Plans the models on a slice, those with experts in both splits, unless they are quantized."""
    for model in models:
        if is_default and slice_name not in _TARGETS_OF.get(model, (slice_name,)):
            continue
        if model in _FP8_MODELS:
            yield planner(model, slice_name, quantize="fp8-block", expert_parallel=True)
            continue
        plan = planner(model, slice_name)
        yield plan
        if plan.server.model.experts is not None:
            yield planner(model, slice_name, expert_parallel=True)
            if plan.server.layout.max_cp > 1:
                yield planner(model, slice_name, cp=plan.server.layout.max_cp)


def refusals(slice_name: str) -> list[str]:
    """Compiles programs that exceed each memory of the chip and returns those that the compiler accepted."""
    plan = planner("qwen3-0.6b", slice_name)
    server, buckets = DryServer.on(plan.target, plan.server), plan.server.buckets
    bucket, many = buckets[0], next(bucket for bucket in buckets if bucket.num_requests == 64)
    shape = CacheShape(num_pages=256, page_size=PAGE_SIZE, max_running=64, max_request_pages=256)
    tiling = tpu.default_tiling(num_tokens=64, kv_heads=1, group=2, page_size=PAGE_SIZE)
    large = tpu.default_tiling(num_tokens=1, kv_heads=1, group=2, page_size=256)
    over_vmem = dataclasses.replace(large, tile_pages=1024)  # 256 MiB; slots would be unrolled
    over_smem = dataclasses.replace(tiling, table_bytes=1 << 30)
    planted = {
        "HBM": (bucket, shape._replace(num_pages=plan.plan().max_pages * 11 // 10), tiling),
        "VMEM": (bucket, shape._replace(page_size=256), over_vmem),
        # 64 requests with 10240 pages each need a page table of 2.5 MiB in 1 MiB of scalar memory.
        "SMEM": (many, shape._replace(max_request_pages=10240), over_smem),
    }
    accepted = []
    for memory, (planted_bucket, planted_shape, planted_tiling) in planted.items():
        kernels = Kernels(attend=partial(tpu.paged_attention, tiling=planted_tiling), write=tpu_write.write_kv)
        try:
            server.compile(planted_bucket, planted_shape, kernels)
            accepted.append(f"{slice_name}: the compiler accepted a program that exceeds {memory}")
        except OutOfMemoryError as error:
            print(f"{slice_name}: a program that exceeds {memory} was refused: {str(error)[:110]}", flush=True)
    # The same page table compiles when the kernel is allowed to split it.
    server.compile(*planted["SMEM"][:2])
    return accepted


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and returns 1 if any expectation fails."""
    parser = check_programs.parser("Compile every program for TPUs, without a TPU.", models=MODELS, targets=TARGETS)
    options = parser.parse_args(arguments)
    faults = []
    for slice_name in options.targets:
        is_default = options.targets == TARGETS
        faults += check_programs.check(planned(options.models, slice_name, is_default=is_default), options)
        faults += refusals(slice_name)
        if slice_name in reshard_programs.TARGETS:
            faults += reshard_programs.check(sorted(set(options.models) & set(reshard_programs.MODELS)), slice_name)
    return check_programs.verdict(faults)


if __name__ == "__main__":
    sys.exit(main())
