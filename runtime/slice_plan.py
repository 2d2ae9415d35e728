"""`meshserve plan`: what a model needs on each device of a slice, by arithmetic, and with --compile by the compiler."""

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.targets import GIB, Target, target

from .aot import DryServer, ProgramReport
from .batch import Bucket, declare_buckets
from .config import ModelConfig, ServeConfig, context_tokens
from .model import abstract_model
from .model_files import find_model
from .model_sizes import is_published, named_model
from .step import CacheShape, cache_page_bytes

MIB = 1 << 20
_SAMPLING_ALL_REDUCES = 20  # at most: two searches of 8 rounds, their totals and a maximum
PAGE_TOLERANCE = 0.02  # by how much prediction and compiler may differ on the number of pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, and the pages that they leave room for."""

    model: str
    target: str
    tp: int
    page_size: int
    hbm_bytes: int
    weight_bytes: int
    scratch_bytes: int  # of the largest program, estimated
    page_bytes: int
    max_pages: int  # if a program may use all memory that the compiler grants
    served_pages: int  # within memory_fraction, with reserve_mib kept free, as the server takes them

    @property
    def served_tokens(self) -> int:
        return self.served_pages * self.page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """The shapes of a server on a target; its programs are `buckets`, its cache `cache_shape(num_pages)`."""

    name: str
    config: ServeConfig
    model: ModelConfig
    target: Target
    num_devices: int
    tokens: tuple[int, ...] = ()  # of the programs to look at; all if empty

    @property
    def layout(self) -> ShardLayout:
        """Raises ValueError if the model cannot be split over so many devices."""
        model = self.model
        return shard_layout(
            num_shards=self.num_devices,
            num_query_heads=model.num_query_heads,
            num_kv_heads=model.num_kv_heads,
            vocab_size=model.vocab_size,
            mlp_dim=model.mlp_dim,
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        config = self.config
        buckets = declare_buckets(
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            page_size=config.page_size,
            max_decode_steps=config.max_decode_steps,
        )
        return tuple(bucket for bucket in buckets if not self.tokens or bucket.num_tokens in self.tokens)

    def cache_shape(self, num_pages: int) -> CacheShape:
        request_pages = min(-(-context_tokens(self.config, self.model) // self.config.page_size), num_pages)
        return CacheShape(num_pages, self.config.page_size, self.config.max_running, request_pages)

    def plan(self) -> MemoryPlan:
        """The arithmetic. Needs neither devices nor the compiler."""
        chip, layout, dtype = self.target.chip, self.layout, jnp.dtype("bfloat16")
        weights = weight_bytes(self.model, layout, dtype)
        scratch = scratch_estimate(self.model, layout, self.buckets[-1], dtype)
        page = cache_page_bytes(self.model, layout, self.config.page_size, dtype)
        free = chip.hbm_bytes - weights - scratch
        served = int(chip.hbm_bytes * self.config.memory_fraction) - weights - scratch
        served -= self.config.reserve_mib * MIB
        if served < page:
            raise MemoryError(
                f"{self.name} takes {weights / GIB:.1f} GiB of weights on each of {self.num_devices} devices of "
                f"{self.target.name}, which have {chip.hbm_bytes / GIB:.1f} GiB; no KV page fits. Take a larger slice."
            )
        return MemoryPlan(
            model=self.name,
            target=self.target.name,
            tp=self.num_devices,
            page_size=self.config.page_size,
            hbm_bytes=chip.hbm_bytes,
            weight_bytes=weights,
            scratch_bytes=scratch,
            page_bytes=page,
            max_pages=free // page,
            served_pages=self.config.num_pages or served // page,
        )


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


def weight_bytes(model: ModelConfig, layout: ShardLayout, dtype: jnp.dtype) -> int:
    """Of one device: every sharded axis is a whole multiple of the shards."""
    _, abstract = abstract_model(model, layout, dtype)
    total = 0
    for weight in abstract.flat_state().leaves:
        is_sharded = any(axis is not None for axis in weight.axes)
        total += weight.get_value().size * dtype.itemsize // (layout.num_shards if is_sharded else 1)
    return total


def scratch_estimate(model: ModelConfig, layout: ShardLayout, bucket: Bucket, dtype: jnp.dtype) -> int:
    """What a program holds beside its arguments: activations of its tokens and logits of its requests.

    Counted is what lives at once: three arrays as wide as the model and the gate and up projections; of the logits the
    float32 values, and what sampling makes of them.
    """
    tokens = bucket.num_tokens * (3 * model.embed_dim + 2 * layout.mlp_dim // layout.num_shards) * dtype.itemsize
    return tokens + 3 * bucket.num_requests * (layout.vocab_size // layout.num_shards) * 4


def plan_table(plan: MemoryPlan) -> str:
    """The plan as text."""
    rows = [
        ("memory", f"{plan.hbm_bytes / GIB:.2f} GiB"),
        ("weights", f"{plan.weight_bytes / GIB:.2f} GiB"),
        ("scratch", f"{plan.scratch_bytes / MIB:.0f} MiB"),
        (f"a page of {plan.page_size} tokens", f"{plan.page_bytes / MIB:.2f} MiB"),
        ("pages that fit at most", f"{plan.max_pages}"),
        ("pages served", f"{plan.served_pages} ({plan.served_tokens} tokens)"),
    ]
    head = f"{plan.model} on {plan.target}, tp {plan.tp}, each device:"
    return "\n".join([head, *(f"  {name:<24} {value:>20}" for name, value in rows)])


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


def plan_json(plan: MemoryPlan, compiled: CompiledPlan | None) -> str:
    """The plan, and what the compiler said, for programs to read."""
    value = dataclasses.asdict(plan)
    if compiled is not None:
        value["programs"] = [dataclasses.asdict(report) for report in compiled.reports]
        value["compiled_max_pages"], value["faults"] = compiled.max_pages, compiled.faults
    return json.dumps(value)


def run_plan(config: ServeConfig, slice_name: str, tensor_parallelism: int, *, is_compiled: bool, is_json: bool) -> int:
    """The command; returns its exit status: 1 if the compiler found a fault.

    Args:
      config: its `model` may be the name of a published size, too.
      slice_name: of the target.
      tensor_parallelism: 0 takes every device of the slice.
      is_compiled: compile every program.
      is_json: print one line of JSON rather than tables.

    Raises:
      MeshserveError, ValueError, MemoryError: there is no such model or slice, or the model does not fit it.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a device
    goal = target(slice_name)
    planner = Planner(
        name=config.model,
        config=config,
        model=_model(config),
        target=goal,
        num_devices=tensor_parallelism or goal.num_devices,
    )
    plan = planner.plan()
    if not is_json:
        print(plan_table(plan))
    if not is_compiled:
        if is_json:
            print(plan_json(plan, None))
        return 0
    if is_json:
        compiled = compile_plan(planner)
        print(plan_json(plan, compiled))
    else:
        print(REPORT_HEAD, flush=True)
        compiled = compile_plan(planner, lambda report: print(report_row(report), flush=True))
        print(f"  pages: {plan.max_pages} predicted, {compiled.max_pages} compile ({compiled.deviation:+.2%})")
        print("\n".join(compiled.faults) or "  everything holds")
    return 1 if compiled.faults else 0


def _model(config: ServeConfig) -> ModelConfig:
    if is_published(config.model):
        return named_model(config.model)
    return ModelConfig.from_file(find_model(config.model).small / "config.json")
