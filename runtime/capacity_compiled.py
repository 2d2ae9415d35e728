"""Every program of a planned server, compiled for a TPU slice that is not there: what must hold of each, and how large
a cache the compiler accepts. Serves `meshserve plan --compile` and `make check-tpu`.
"""

import dataclasses
from collections.abc import Callable

from .aot import DryServer, ProgramReport
from .capacity import MIB, MemoryPlan, Planner
from .compiles import ProgramKey

_SAMPLING_ALL_REDUCES = 20  # at most: two searches of 8 rounds, their totals and a maximum
PAGE_TOLERANCE = 0.02  # by how much prediction and compiler may differ on the number of pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """What the compiler says: a report for each program, and the largest cache it accepts."""

    plan: MemoryPlan
    reports: tuple[ProgramReport, ...]
    max_pages: int  # beside which every program has room
    faults: tuple[str, ...]  # what does not hold; empty if all is well

    @property
    def deviation(self) -> float:
        """Of the predicted number of pages from the largest that compiles."""
        return self.plan.max_pages / self.max_pages - 1.0


def compile_plan(planner: Planner, on_report: Callable[[ProgramReport], None] = lambda report: None) -> CompiledPlan:
    """Compiles every program at the served number of pages, then looks for the largest cache of the last step.

    What the other programs keep beside the cache, and the last step does not know of, is taken off that.

    Raises:
      OutOfMemoryError: a program does not fit.
      RuntimeError: libtpu is not installed.
    """
    plan, has_controls = planner.plan(), planner.config.controls
    server = DryServer.on(planner.target, planner.model, tensor_parallelism=planner.num_devices)
    shape = planner.cache_shape(plan.served_pages)
    reports: dict[ProgramKey, ProgramReport] = {}
    for key, to_lower in server.programs(planner.buckets, shape, has_controls=has_controls).items():
        reports[key] = server.report(key, to_lower)
        on_report(reports[key])
    faults = [
        fault for report in reports.values() for fault in program_faults(planner, report, server.cache_bytes(shape))
    ]
    last, kept_bytes = planner.buckets[-1], 0
    if has_controls:
        controls = server.controls(planner.buckets, shape)
        scratch = controls.scratch_bytes({key: reports[key].added_bytes for key in controls.to_lower()})
        kept_bytes = controls.resident_bytes + max(0, scratch - reports[last.kind, last.num_tokens].added_bytes)
    largest = largest_cache(server, planner, plan.max_pages) - -(-kept_bytes // plan.page_bytes)
    compiled = CompiledPlan(plan=plan, reports=tuple(reports.values()), max_pages=largest, faults=tuple(faults))
    if abs(compiled.deviation) > PAGE_TOLERANCE:
        fault = f"{plan.max_pages} pages predicted, {largest} compile: {compiled.deviation:+.1%}"
        compiled = dataclasses.replace(compiled, faults=(*faults, fault))
    return compiled


def program_faults(planner: Planner, report: ProgramReport, cache_bytes: int) -> list[str]:
    """What should hold of a program, and does not."""
    plan = planner.plan()
    most_scratch = 2 * plan.scratch_bytes + 64 * MIB
    expected = {f"temporaries stay below {most_scratch / MIB:.0f} MiB": report.temp_bytes < most_scratch}
    if report.is_step:
        num_layers = planner.model.num_layers if planner.target.chip.is_unrolled else 1
        least = 2 * num_layers + 1 if planner.num_devices > 1 else 0
        most = least + _SAMPLING_ALL_REDUCES
        expected |= {
            "the KV cache is updated in place": report.aliased_bytes >= cache_bytes,
            f"{2 * num_layers} kernels write and attend": report.num_kernels == 2 * num_layers,
            # Two a layer, one for the embedding, and those of the searches in sampling.
            f"{least} to {most} all-reduces": least <= report.num_all_reduces <= most,
        }
    else:
        expected["there are no kernels"] = report.num_kernels == 0
    if report.kind in ("sample", "set row"):
        state_bytes = planner.control_state_bytes
        expected["history and bias are updated in place"] = report.aliased_bytes >= state_bytes
    return [f"{report.kind} {report.size}: not so: {what}" for what, holds in expected.items() if not holds]


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
    f"{'program':<16}{'size':>8}{'s (CPU)':>9}{'peak MiB':>10}{'temp MiB':>10}{'code KiB':>10}"
    f"{'all-reduces':>13}{'kernels':>9}"
)


def report_row(report: ProgramReport) -> str:
    """A line of the table under `REPORT_HEAD`."""
    return (
        f"{report.kind:<16}{report.size:>8}{report.cpu_seconds:>9.1f}{report.peak_bytes / MIB:>10.0f}"
        f"{report.temp_bytes / MIB:>10.1f}{report.code_bytes / 1024:>10.0f}{report.num_all_reduces:>13}"
        f"{report.num_kernels:>9}"
    )
