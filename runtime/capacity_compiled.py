"""The programs of a planned server, compiled for a TPU slice that is not there: what must hold of each, and how large a
cache the compiler accepts. Serves `meshserve plan --compile` and `make check-tpu`.
"""

import dataclasses
from collections.abc import Callable

from .aot import DryServer, ProgramReport
from .capacity import MIB, MemoryPlan, Planner

_SAMPLING_ALL_REDUCES = 20  # at most: two searches of 8 rounds, their totals and a maximum
PAGE_TOLERANCE = 0.02  # by how much prediction and compiler may differ on the number of pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """What the compiler says: a report for each program, and the largest cache it accepts."""

    plan: MemoryPlan
    reports: tuple[ProgramReport, ...]
    max_pages: int
    faults: tuple[str, ...]  # what does not hold; empty if all is well

    @property
    def deviation(self) -> float:
        """Of the predicted number of pages from the largest that compiles."""
        return self.plan.max_pages / self.max_pages - 1.0


def compile_plan(planner: Planner, on_report: Callable[[ProgramReport], None] = lambda report: None) -> CompiledPlan:
    """Compiles every program at the served number of pages, then looks for the largest cache of the last program.

    Raises:
      OutOfMemoryError: a program does not fit.
      RuntimeError: libtpu is not installed.
    """
    plan = planner.plan()
    server = DryServer.on(planner.target, planner.model, tensor_parallelism=planner.num_devices)
    shape = planner.cache_shape(plan.served_pages)
    reports = []
    for bucket in planner.buckets:
        reports.append(server.report(bucket, shape))
        on_report(reports[-1])
    cache_bytes = server.cache_bytes(shape)
    faults = [fault for report in reports for fault in program_faults(planner, report, cache_bytes)]
    largest = largest_cache(server, planner, plan.max_pages)
    compiled = CompiledPlan(plan=plan, reports=tuple(reports), max_pages=largest, faults=tuple(faults))
    if abs(compiled.deviation) > PAGE_TOLERANCE:
        fault = f"{plan.max_pages} pages predicted, {largest} compile: {compiled.deviation:+.1%}"
        compiled = dataclasses.replace(compiled, faults=(*faults, fault))
    return compiled


def program_faults(planner: Planner, report: ProgramReport, cache_bytes: int) -> list[str]:
    """What should hold of every program, and does not."""
    num_layers = planner.model.num_layers if planner.target.chip.is_unrolled else 1
    least = 2 * num_layers + 1 if planner.num_devices > 1 else 0
    most_scratch = 2 * planner.plan().scratch_bytes + 64 * MIB
    expected = {
        "the KV cache is updated in place": report.aliased_bytes >= cache_bytes,
        f"temporaries stay below {most_scratch / MIB:.0f} MiB": report.temp_bytes < most_scratch,
        f"{2 * num_layers} kernels write and attend": report.num_kernels == 2 * num_layers,
        # Two a layer, one for the embedding, and those of the searches in sampling.
        f"{least} to {least + _SAMPLING_ALL_REDUCES} all-reduces": 0
        <= report.num_all_reduces - least
        <= _SAMPLING_ALL_REDUCES,
    }
    return [f"{report.bucket.num_tokens} tokens: not so: {what}" for what, holds in expected.items() if not holds]


def largest_cache(server: DryServer, planner: Planner, guess: int) -> int:
    """The largest number of pages, to a hundredth, for which the largest program compiles."""
    bucket = planner.buckets[-1]

    def fits(num_pages: int) -> bool:
        return server.fits(bucket, planner.cache_shape(num_pages))

    step = max(1, guess // 200)
    margin = 2 * step
    low, high = guess - step, guess + step
    while not fits(low):
        low, high = low - margin, low
    while fits(high):
        low, high = high, high + margin
    while high - low > 2 * step:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


REPORT_HEAD = (
    f"{'tokens':>8}{'s (CPU)':>9}{'peak MiB':>10}{'temp MiB':>10}{'code KiB':>10}{'all-reduces':>13}{'kernels':>9}"
)


def report_row(report: ProgramReport) -> str:
    """A line of the table under `REPORT_HEAD`."""
    return (
        f"{report.bucket.num_tokens:>8}{report.cpu_seconds:>9.1f}{report.peak_bytes / MIB:>10.0f}"
        f"{report.temp_bytes / MIB:>10.1f}{report.code_bytes / 1024:>10.0f}{report.num_all_reduces:>13}"
        f"{report.num_kernels:>9}"
    )
