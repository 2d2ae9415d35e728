"""Compiles every program of a planned server for absent TPUs or GPUs, checks them, and finds the largest cache.

Serves `meshserve plan --compile`, `make check-tpu` and `make check-cuda`.
"""

import dataclasses
from collections.abc import Callable, Sequence

from meshserve.kernels import experts, linear, paged_attention, sampling
from meshserve.kernels.implementation import choose
from meshserve.sharding.collectives import p2p_max_bytes
from meshserve.sharding.memory import shard_bytes

from ..program.batch import ProgramKey
from ..program.step import UNROLLED_TOKENS
from ..resolve.kernel_log import products_left_to_xla
from ..resolve.kernel_selection import device_like, max_fused_prompt_tokens
from .aot import DryServer, KnownKey, ProgramReport
from .memory_plan import MIB, MemoryPlan, Planner

_SAMPLING_ALL_REDUCES = 30  # upper bound: one search of 8 rounds for top-p, two for all filters; totals and maxima
_NOTHING_TWICE = "nothing is computed twice to save memory"
# The cache of a server with fewer layers has more pages and as many bytes. What else such programs hold is not what was
# planned for, so the compiler may save memory where it would not with all layers.
NEED_ALL_LAYERS = (_NOTHING_TWICE,)
PAGE_TOLERANCE = 0.02  # allowed difference between the planned number of pages and the compiler's


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """A report for each compiled program, and the largest cache that fits beside all of them."""

    plan: MemoryPlan
    reports: tuple[ProgramReport, ...]
    max_pages: int  # the largest cache
    faults: tuple[str, ...]  # the failed expectations
    left_out: tuple[str, ...] = ()  # the expectations that were not checked

    @property
    def deviation(self) -> float:
        """The relative deviation of the planned number of pages from the largest that compiles."""
        return self.plan.max_pages / self.max_pages - 1.0


def compile_plan(
    planner: Planner,
    on_report: Callable[[ProgramReport], None] = lambda report: None,
    known: dict[KnownKey, ProgramReport] | None = None,
    *,
    has_all_layers: bool = True,
) -> CompiledPlan:
    """Compiles every program with the served number of pages, then finds the largest cache of the last step.

    Memory that other programs need beside the cache, and the last step does not account for, is subtracted.

    Args:
      planner: The planned server.
      on_report: Receives the report of each program.
      known: See `DryServer.report`.
      has_all_layers: Whether the model was planned with all its layers; otherwise `NEED_ALL_LAYERS` are left out.

    Raises:
      OutOfMemoryError: A program does not fit.
      NoCompilerError: The compiler for these devices is not installed.
    """
    plan, server = planner.plan(), DryServer.on(planner.target, planner.server)
    shape = planner.server.cache_shape(plan.served_pages)
    programs = server.programs(shape)
    reports: dict[ProgramKey, ProgramReport] = {}
    for key, to_lower in programs.to_lower().items():
        reports[key] = server.report(key, to_lower, known)
        on_report(reports[key])
    left_out = () if has_all_layers else NEED_ALL_LAYERS
    cache_bytes = server.cache_bytes(shape)
    faults = [fault for each in reports.values() for fault in program_faults(planner, each, cache_bytes, left_out)]
    last = programs.buckets[-1]
    beside_bytes = shard_bytes(programs.output_buffers)
    beside_bytes -= shard_bytes(dataclasses.replace(programs, buckets=[last]).output_buffers)
    if programs.processors is not None:
        processors = programs.processors
        scratch = processors.scratch_bytes({key: reports[key].added_bytes for key in processors.to_lower()})
        beside_bytes += processors.resident_bytes + max(0, scratch - reports[last.key].added_bytes)
    if planner.server.platform == "gpu":
        largest = cache_that_fits(planner, reports[last.key], cache_bytes)
    else:
        largest = largest_cache(server, plan.max_pages)
    largest -= -(-beside_bytes // plan.page_bytes)
    compiled = CompiledPlan(
        plan=plan, reports=tuple(reports.values()), max_pages=largest, faults=tuple(faults), left_out=left_out
    )
    if abs(compiled.deviation) > PAGE_TOLERANCE:
        fault = f"{plan.max_pages} pages planned, {largest} compile: {compiled.deviation:+.1%}"
        compiled = dataclasses.replace(compiled, faults=(*faults, fault))
    return compiled


def program_faults(
    planner: Planner, report: ProgramReport, cache_bytes: int, left_out: Sequence[str] = ()
) -> list[str]:
    """Returns the expectations about a program that failed, except those to leave out."""
    plan, text = planner.plan(), report.text
    most_scratch = 2 * plan.scratch_bytes + 64 * MIB
    expected = {
        f"temporaries stay below {most_scratch / MIB:.0f} MiB": report.temp_bytes < most_scratch,
        _NOTHING_TWICE: text.num_recomputed == 0,
    }
    if planner.server.platform == "gpu":  # the TPU compiler refuses such programs, and copies weights into VMEM
        expected |= {
            f"it uses less than {plan.limit_bytes / MIB:.0f} MiB": report.peak_bytes < plan.limit_bytes,
            f"no weights are copied: {', '.join(text.weight_copies[:3])}": not text.weight_copies,
        }
    else:
        expected["weights are multiplied without a copy"] = report.num_weight_slices == 0
    num_kernels = _num_kernels(planner, report)
    expected[f"it calls {num_kernels} kernels"] = text.num_kernels == num_kernels
    if report.is_step:
        least = _num_all_reduces(planner, report, is_p2p=False)
        most = least + _SAMPLING_ALL_REDUCES
        expected |= {
            "the KV cache is updated in place": report.aliased_bytes >= cache_bytes,
            # Two per layer, one for the embedding, and those of the searches in sampling.
            f"{least} to {most} all-reduces": least <= text.num_all_reduces <= most,
        }
    if report.kind in ("sample", "set row"):
        state_bytes = planner.processor_state_bytes
        expected["history and bias are updated in place"] = report.aliased_bytes >= state_bytes
    failed = [what for what, holds in expected.items() if not holds and what not in left_out]
    return [f"{report.kind} {report.size}: failed: {what}" for what in failed]


def _num_kernels(planner: Planner, report: ProgramReport) -> int:
    """Returns the expected number of calls of our kernels in a program."""
    server, names, num_layers = planner.server, planner.server.kernel_names, planner.server.model.num_layers
    has_experts = server.model.experts is not None and experts.IMPLEMENTATIONS[names.moe_backend].is_kernel
    products = _fp8_products(planner)
    if report.kind.startswith("prompt"):  # the last layer's MLP
        num_products = len(products & {"gate_up", "down"})
        return int(num_layers - 1 in server.model.stacks["layers"]) if has_experts else num_products
    num_expert_kernels = _num_written(planner, server.model.stacks["layers"]) if has_experts and report.is_step else 0
    attention = paged_attention.IMPLEMENTATIONS[names.attention]
    if attention.is_kernel and server.platform == "tpu":
        return 2 * _num_written_layers(planner) + num_expert_kernels if report.is_step else 0  # to write and to attend
    is_sampling = report.kind.startswith(("step", "decode", "sample"))
    filters = is_sampling and not {"greedy", "random"}.intersection(report.kind.split())
    has_kernel = names.has_gpu_kernels and server.tp == 1 and _has_sampling_kernel(planner)
    in_sampling = int(filters and has_kernel) + int(_has_readback(planner, report))
    has_fp8_head = names.has_gpu_decode_kernels and server.model.head_quantization is not None
    has_head = int(has_fp8_head and report.is_step and report.kind != "pooling")
    has_p2p = _has_p2p(planner)
    num_p2p = int(has_p2p and report.is_step and report.kind != "pooling")  # gathers the best tokens
    if report.kind.startswith("decode") and names.has_gpu_decode_kernels and report.size <= server.max_fused_tokens:
        num_p2p += int(has_p2p)  # the embedding
        num_calls = in_sampling + num_p2p + has_head + (1 if server.tp == 1 or has_p2p else 5 * num_layers)
        is_unrolled = server.tp == 1 and report.size <= UNROLLED_TOKENS and "greedy x" in report.kind
        return num_calls * (int(report.kind.rpartition(" ")[2]) if is_unrolled else 1)
    has_adapters = "with adapters" in report.kind  # whose layers are not fused
    if report.is_step and not has_adapters and report.size <= max_fused_prompt_tokens(names, server.kernel_shapes):
        num_layers = 1  # the last one; another call runs those before it
        has_head += 1
    num_p2p += _num_all_reduces(planner, report, is_p2p=True) if report.is_step else 0
    has_calls = report.is_step and attention.is_kernel
    heads_and_attention = (1 + int(attention.prepare is not None)) * num_layers if has_calls else 0
    num_products = len(products) * num_layers if report.is_step else 0
    return in_sampling + num_p2p + heads_and_attention + num_products + has_head + num_expert_kernels


def _fp8_products(planner: Planner) -> set[str]:
    """Returns the projections of a layer that our calls multiply with, in steps that are not fused."""
    names, shapes = planner.server.kernel_names, planner.server.kernel_shapes
    if not linear.IMPLEMENTATIONS[names.linear].has_fp8_products:
        return set()
    return shapes.linear.matrices.keys() - products_left_to_xla(names, shapes)


def _has_readback(planner: Planner, report: ProgramReport) -> bool:
    """Returns whether a program writes its tokens to pinned memory: one for decodes with drafts, which has a mode."""
    server, (kind, *mode) = planner.server, report.kind.split()
    has_drafts = server.limits.draft_tokens > 0 and kind == "decode" and len(mode) == 1
    return has_drafts and server.kernel_names.has_gpu_decode_kernels and server.tp == 1


def _has_sampling_kernel(planner: Planner) -> bool:
    device, vocab_size = device_like(planner.target.chip), planner.server.model.vocab_size
    return choose(sampling.IMPLEMENTATIONS, device, vocab_size).implementation is not None


def _has_p2p(planner: Planner) -> bool:
    return planner.server.tp > 1 and planner.server.kernel_names.has_p2p


def _num_written_layers(planner: Planner) -> int:
    return _num_written(planner, range(planner.server.model.num_layers))


def _num_written(planner: Planner, layers: Sequence[int]) -> int:
    """Returns how many of such layers are in a program's text: a loop has its layer once, and the last one follows."""
    is_unrolled = planner.target.chip.is_unrolled or len(planner.server.model.stacks) > 1
    return len(layers) if is_unrolled else min(2, len(layers))


def _num_all_reduces(planner: Planner, report: ProgramReport, *, is_p2p: bool) -> int:
    """Returns the number of all-reduces, by P2P or by XLA, in a step whose layers are not fused."""
    server = planner.server
    if server.tp == 1:
        return 0
    num_wanted = report.size if report.kind.startswith("decode") else min(report.size, server.limits.max_running)
    # One for the embedding and two per layer. The last one sums only the rows whose logits are wanted.
    num_sums = {report.size: 2 * _num_written_layers(planner)}
    num_sums[num_wanted] = num_sums.get(num_wanted, 0) + 1

    def are_p2p(num_rows: int) -> bool:
        num_bytes = num_rows * server.model.embed_dim * server.dtype.itemsize
        return _has_p2p(planner) and num_bytes <= p2p_max_bytes(server.tp)

    return sum(number for num_rows, number in num_sums.items() if are_p2p(num_rows) == is_p2p)


def cache_that_fits(planner: Planner, report: ProgramReport, cache_bytes: int) -> int:
    """Returns the number of pages that fit beside a program, computed from the compiler's figures.

    The CUDA compiler accepts programs of any size; one that does not fit fails when it runs.
    """
    plan = planner.plan()
    return (plan.limit_bytes - (report.peak_bytes - cache_bytes)) // plan.page_bytes


def largest_cache(server: DryServer, guess: int) -> int:
    """Returns the largest number of pages for which the largest step compiles, to within one percent."""
    bucket = server.server.buckets[-1]

    def fits(num_pages: int) -> bool:
        return server.fits(bucket, server.server.cache_shape(num_pages))

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
    """Returns a line of the table under `REPORT_HEAD`."""
    return (
        f"{report.kind:<16}{report.size:>8}{report.cpu_seconds:>9.1f}{report.peak_bytes / MIB:>10.0f}"
        f"{report.temp_bytes / MIB:>10.1f}{report.code_bytes / 1024:>10.0f}{report.text.num_all_reduces:>13}"
        f"{report.text.num_kernels:>9}{report.text.num_launches:>10}"
    )
