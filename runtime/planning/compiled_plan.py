"""Every program of a planned server, compiled for TPUs or GPUs that are not there: what must hold of each, and how
large a cache has room beside them. Serves `meshserve plan --compile`, `make check-tpu` and `make check-cuda`.
"""

import dataclasses
from collections.abc import Callable

from meshserve.sharding.collectives import p2p_max_bytes

from ..program.compile_cache import ProgramKey
from ..scheduler.limits import MAX_FUSED_TOKENS
from .aot import DryServer, KnownKey, ProgramReport
from .memory_plan import MIB, MemoryPlan, Planner

_SAMPLING_ALL_REDUCES = 30  # at most: a search of 8 rounds for top-p alone, two for all filters; totals and maxima
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


def compile_plan(
    planner: Planner,
    on_report: Callable[[ProgramReport], None] = lambda report: None,
    known: dict[KnownKey, ProgramReport] | None = None,
) -> CompiledPlan:
    """Compiles every program at the served number of pages, then looks for the largest cache of the last step.

    What the other programs keep beside the cache, and the last step does not know of, is taken off that. `known` as for
    `DryServer.report`.

    Raises:
      OutOfMemoryError: a program does not fit.
      NoCompilerError: the compiler for these devices is not installed.
    """
    plan, has_processors = planner.plan(), planner.config.logits_processors
    server = DryServer.on(planner.target, planner.model, config=planner.config, tensor_parallelism=planner.num_devices)
    shape = planner.cache_shape(plan.served_pages)
    reports: dict[ProgramKey, ProgramReport] = {}
    for key, to_lower in server.programs(planner.buckets, shape, has_processors=has_processors).items():
        reports[key] = server.report(key, to_lower, known)
        on_report(reports[key])
    faults = [
        fault for report in reports.values() for fault in program_faults(planner, report, server.cache_bytes(shape))
    ]
    last = planner.buckets[-1]
    output_buffer_bytes = server.output_buffer_bytes(planner.buckets) - server.output_buffer_bytes([last])
    if has_processors:
        processors = server.processors(planner.buckets, shape)
        scratch = processors.scratch_bytes({key: reports[key].added_bytes for key in processors.to_lower()})
        output_buffer_bytes += processors.resident_bytes + max(
            0, scratch - reports[last.kind, last.num_tokens].added_bytes
        )
    if planner.target.chip.platform == "gpu":
        largest = cache_that_fits(planner, reports[last.kind, last.num_tokens], server.cache_bytes(shape))
    else:
        largest = largest_cache(server, planner, plan.max_pages)
    largest -= -(-output_buffer_bytes // plan.page_bytes)
    compiled = CompiledPlan(plan=plan, reports=tuple(reports.values()), max_pages=largest, faults=tuple(faults))
    if abs(compiled.deviation) > PAGE_TOLERANCE:
        fault = f"{plan.max_pages} pages predicted, {largest} compile: {compiled.deviation:+.1%}"
        compiled = dataclasses.replace(compiled, faults=(*faults, fault))
    return compiled


def program_faults(planner: Planner, report: ProgramReport, cache_bytes: int) -> list[str]:
    """What should hold of a program, and does not."""
    plan, text = planner.plan(), report.text
    most_scratch = 2 * plan.scratch_bytes + 64 * MIB
    expected = {
        f"temporaries stay below {most_scratch / MIB:.0f} MiB": report.temp_bytes < most_scratch,
        "nothing is computed twice to save memory": text.num_recomputed == 0,
    }
    if planner.target.chip.platform == "gpu":  # a TPU's compiler refuses, and copies into nearer memory
        expected |= {
            f"it takes less than {plan.limit_bytes / MIB:.0f} MiB": report.peak_bytes < plan.limit_bytes,
            f"no weights are copied: {', '.join(text.weight_copies[:3])}": not text.weight_copies,
        }
    else:
        expected["weights are multiplied where they lie"] = report.num_weight_slices == 0
    num_kernels = _num_kernels(planner, report)
    expected[f"it calls {num_kernels} kernels"] = text.num_kernels == num_kernels
    if report.is_step:
        least = _num_sums(planner, report, by_p2p=False)
        most = least + _SAMPLING_ALL_REDUCES
        expected |= {
            "the KV cache is updated in place": report.aliased_bytes >= cache_bytes,
            # Two a layer, one for the embedding, and those of the searches in sampling.
            f"{least} to {most} all-reduces": least <= text.num_all_reduces <= most,
        }
    if report.kind in ("sample", "set row"):
        state_bytes = planner.processor_state_bytes
        expected["history and bias are updated in place"] = report.aliased_bytes >= state_bytes
    return [f"{report.kind} {report.size}: not so: {what}" for what, holds in expected.items() if not holds]


def _num_kernels(planner: Planner, report: ProgramReport) -> int:
    """Calls of our kernels in a program."""
    chip, config, num_layers = planner.target.chip, planner.config, planner.model.num_layers
    if chip.platform == "tpu":
        return 2 * _num_written_layers(planner) if report.is_step else 0  # to write and to attend
    is_sampling = report.kind.startswith(("step", "decode", "sample"))
    filters = is_sampling and not {"greedy", "random"}.intersection(report.kind.split())
    has_kernel = "cuda" in (config.attention, config.decode_layers) and planner.num_devices == 1
    in_sampling = int(filters and has_kernel)
    has_p2p = _has_p2p(planner)
    by_p2p = int(has_p2p and report.is_step)  # the best tokens
    if report.kind.startswith("decode") and config.decode_layers == "cuda" and report.size <= MAX_FUSED_TOKENS:
        by_p2p += int(has_p2p)  # the embedding
        return in_sampling + by_p2p + (1 if planner.num_devices == 1 or has_p2p else 5 * num_layers)
    by_p2p += _num_sums(planner, report, by_p2p=True) if report.is_step else 0
    heads_and_attention = 2 * num_layers if report.is_step and config.attention == "cuda" else 0
    return in_sampling + by_p2p + heads_and_attention


def _has_p2p(planner: Planner) -> bool:
    return planner.num_devices > 1 and planner.config.all_reduce == "p2p"


def _num_written_layers(planner: Planner) -> int:
    """How often a program has a layer: a loop has it once, and the last one is written out behind it."""
    num_layers = planner.model.num_layers
    return num_layers if planner.target.chip.is_unrolled else min(2, num_layers)


def _num_sums(planner: Planner, report: ProgramReport, *, by_p2p: bool) -> int:
    """Sums over the devices in a step whose layers are not fused, by its peers or by XLA."""
    if planner.num_devices == 1:
        return 0
    num_wanted = report.size if report.kind.startswith("decode") else min(report.size, planner.config.max_running)
    # One for the embedding and two a layer, of which the last adds up those rows alone whose logits are wanted.
    num_sums = {report.size: 2 * _num_written_layers(planner)}
    num_sums[num_wanted] = num_sums.get(num_wanted, 0) + 1

    def are_by_p2p(num_rows: int) -> bool:
        num_bytes = num_rows * planner.model.embed_dim * planner.dtype.itemsize
        return _has_p2p(planner) and num_bytes <= p2p_max_bytes(planner.num_devices)

    return sum(number for num_rows, number in num_sums.items() if are_by_p2p(num_rows) == by_p2p)


def cache_that_fits(planner: Planner, report: ProgramReport, cache_bytes: int) -> int:
    """The number of pages beside which a program has room, by the compiler's own figures for it.

    The CUDA compiler refuses nothing: a program that does not fit fails when it runs.
    """
    plan = planner.plan()
    return (plan.limit_bytes - (report.peak_bytes - cache_bytes)) // plan.page_bytes


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
    f"{'all-reduces':>13}{'kernels':>9}{'launches':>10}"
)


def report_row(report: ProgramReport) -> str:
    """A line of the table under `REPORT_HEAD`."""
    return (
        f"{report.kind:<16}{report.size:>8}{report.cpu_seconds:>9.1f}{report.peak_bytes / MIB:>10.0f}"
        f"{report.temp_bytes / MIB:>10.1f}{report.code_bytes / 1024:>10.0f}{report.text.num_all_reduces:>13}"
        f"{report.text.num_kernels:>9}{report.text.num_launches:>10}"
    )
