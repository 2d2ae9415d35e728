"""`meshserve plan`: reports memory, speed and the best TP size of a planned server, as text or JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from meshserve.sharding.chips import GIB, NoCompilerError, target

from ..api.errors import ConfigError
from ..model_files.model_config import ModelConfig
from ..options.serve_config import ServeConfig
from ..resolve.kernel_log import kernel_line, refusal_lines
from ..resolve.kernel_names import KernelNames, OptionRefusal
from ..weights.local_adapters import with_local_adapters
from ..weights.locate import DEMO_MODEL, find_model, model_directory
from ..weights.model_task import with_task
from ..weights.registry import is_published, named_model, read_model
from .aot import KnownKey, ProgramReport
from .compiled_plan import REPORT_HEAD, CompiledPlan, compile_plan, report_row
from .memory_plan import MIB, MemoryPlan, Planner
from .roofline import FirstToken, Roof
from .tp_choice import TPSizePlan, best_tp_size, check_tp, roofline_of, tp_size_plans

UNMEASURED = "these kernels were never measured on this chip: the times are the least, and may be several times as long"
PROMPT_LENGTHS = (1024, 8192)
_TEXT_LENGTHS = (32, 512, 8192)  # in tokens, for embedding models


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results for a planned server."""

    plan: MemoryPlan
    kernels: KernelNames
    refusals: tuple[OptionRefusal, ...]  # why better kernels cannot serve
    length: int  # tokens per request
    is_measured: bool = False  # whether the speed of all kernels was measured on this chip
    decode: tuple[Roof, ...] = ()  # empty if the device's speed is unknown
    prefill: tuple[Roof, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()  # empty where nothing like it was measured
    pooling: tuple[Roof, ...] = ()  # for an embedding model or reranker, in place of `decode` and `prefill`
    tp_sizes: tuple[TPSizePlan, ...] = ()
    best: TPSizePlan | None = None
    reason: str = ""


def make_report(planner: Planner, *, length: int, batches: Sequence[int]) -> Report:
    """Computes the report for requests of `length` tokens, and decode batches of these sizes.

    Raises:
      MemoryError: The model does not fit at this TP size. The message names one at which it fits, if there is one.
    """
    tp_sizes = tp_size_plans(planner, length)
    best, reason = best_tp_size(tp_sizes, length)
    try:
        plan = planner.plan()
    except MemoryError as error:
        remedy = f" On {planner.target.name} it fits with {best.flags}." if best is not None else ""
        raise MemoryError(f"{error}{remedy}") from None
    server = planner.server
    report = Report(
        plan=plan,
        kernels=server.kernel_names,
        refusals=server.kernel_refusals,
        length=length,
        tp_sizes=tuple(tp_sizes),
        best=best,
        reason=reason,
    )
    roofline, step_tokens = roofline_of(planner), server.limits.max_step_tokens
    if roofline is None:
        return report
    report = dataclasses.replace(report, is_measured=roofline.is_measured)
    if planner.server.model.pooling is not None:
        full_steps = [roofline.pooling(tokens, step_tokens) for tokens in _TEXT_LENGTHS]
        return dataclasses.replace(report, pooling=tuple(full_steps))
    longest = planner.server.limits.max_context
    lengths = (*PROMPT_LENGTHS, *([longest] if longest > max(PROMPT_LENGTHS) else []))
    first_tokens = [roofline.first_token(tokens, step_tokens) for tokens in lengths if tokens <= longest]
    return dataclasses.replace(
        report,
        decode=tuple(roofline.decode(batch, length) for batch in batches),
        prefill=tuple(roofline.prefill(tokens, step_tokens) for tokens in lengths),
        first_tokens=tuple(found for found in first_tokens if found is not None),
    )


def plan_table(plan: MemoryPlan) -> str:
    """Returns the memory of a device as text."""
    active = [("of a token", f"{plan.num_active_params / 1e9:.2f} B"), ("experts", plan.split)]
    rows = [
        ("parameters", f"{plan.num_params / 1e9:.2f} B"),
        *(active if plan.split else []),
        ("memory", f"{plan.limit_bytes / GIB:.2f} GiB" if plan.limit_bytes else "host memory"),
        ("weights", f"{plan.weight_bytes / GIB:.2f} GiB"),
        ("scratch", f"{plan.scratch_bytes / MIB:.0f} MiB"),
        ("penalties and bias", f"{plan.processor_bytes / MIB:.0f} MiB"),
        (f"page of {plan.page_size} tokens", f"{plan.page_bytes / MIB:.2f} MiB"),
        ("maximum pages", f"{plan.max_pages}"),
        ("pages served", f"{plan.served_pages} ({plan.served_tokens} tokens)"),
        *([("host cache", f"{plan.host_pages * plan.page_size} tokens")] if plan.host_pages else []),
        ("step programs", f"{plan.num_programs}"),
    ]
    kinds = [plan.dtype]
    if plan.quantization != "none":
        kinds.append(f"weights {plan.quantization}")
    if plan.cache_dtype != plan.dtype:
        kinds.append(f"KV cache {plan.cache_dtype}")
    sizes = f"tp {plan.tp}" + (f", cp {plan.cp}" if plan.cp > 1 else "")
    head = f"{plan.model} on {plan.target}, {sizes}, {', '.join(kinds)}, per device:"
    limits = f"  limits: {plan.limits}"
    return "\n".join([head, *(f"  {name:<26} {value:>22}" for name, value in rows), limits])


def report_text(report: Report) -> str:
    """Returns the report as tables."""
    plan, length = report.plan, report.length
    lines = [plan_table(plan), f"  kernels: {kernel_line(report.kernels, has_experts=bool(plan.split))}"]
    lines += [f"  {line}" for line in refusal_lines(report.refusals)]
    lines.append(f"  {f'requests of {length} tokens':<26} {plan.num_requests(length):>22}")
    if report.decode or report.pooling:
        lines += [] if report.is_measured else ["", UNMEASURED]
        head = f"{'roofline':<28}{'ms':>10}{'bound':>10}{'+ all-reduces, ms (estimated)':>32}{'= tokens/s':>14}"
        lines += ["", head]
        fits = {False: "  exceeds the cache or max_running", True: ""}
        for roof in report.decode:
            name = f"decode {roof.num_tokens} x {roof.context}"
            lines.append(_roof_row(name, roof) + fits[roof.num_tokens <= plan.num_requests(length)])
        lines += [_roof_row(f"prefill of {roof.num_tokens}", roof) for roof in report.prefill]
        if report.first_tokens:
            lines += ["", f"{'first token, predicted':<28}{'ms, computed':>14}{'from host memory':>20}"]
        for first in report.first_tokens:
            times = f"{1e3 * first.computed_seconds:>14.0f}{1e3 * first.restored_seconds:>20.0f}"
            lines.append(f"{f'prompt of {first.num_tokens}':<28}{times}")
        lines += [_roof_row(f"step, texts of {roof.context}", roof) for roof in report.pooling]
    unit = "text" if report.pooling else "token"
    width = max([4, *(len(item.name) for item in report.tp_sizes)])
    counts = f"{'tp':>{width}}{'replicas':>10}{'requests each':>15}{'limited by':>14}"
    lines += ["", f"{counts}{f'ms/{unit} alone':>18}{'total tokens/s':>17}"]
    for item in report.tp_sizes:
        speeds = f"{1e3 * item.step_seconds:>18.3f}{item.tokens_per_second:>17,.0f}" if item.step_seconds else ""
        row = f"{item.name:>{width}}{item.num_replicas:>10}{item.num_requests:>15}{item.limited_by:>14}{speeds}"
        lines.append(row if item.num_requests else f"{item.name:>{width}}{item.num_replicas:>10}  does not fit")
    best = f"best: tp {report.best.name}: " if report.best is not None else "no TP size fits: "
    return "\n".join([*lines, best + report.reason])


def _roof_row(name: str, roof: Roof) -> str:
    return (
        f"{name:<28}{1e3 * roof.seconds:>10.3f}{roof.bound:>10}{1e3 * roof.all_reduce_seconds:>32.3f}"
        f"{roof.tokens_per_second:>14,.0f}"
    )


def report_json(report: Report, compiled: CompiledPlan | None = None) -> str:
    """Returns the report as one line of JSON. `figures` has the fields of the line that a server logs at startup."""

    def roofs(found: Sequence[Roof]) -> list[dict[str, object]]:
        return [dataclasses.asdict(roof) | {"tokens_per_second": roof.tokens_per_second} for roof in found]

    value = dataclasses.asdict(report.plan) | {
        "kernels": dataclasses.asdict(report.kernels),
        "kernel_refusals": [refusal._asdict() for refusal in report.refusals],
        "is_measured": report.is_measured,
        "figures": dataclasses.asdict(report.plan.figures),
        "served_tokens": report.plan.served_tokens,
        "length": report.length,
        "num_requests": report.plan.num_requests(report.length),
        "decode": roofs(report.decode),
        "prefill": roofs(report.prefill),
        "first_tokens": [dataclasses.asdict(first) for first in report.first_tokens],
        "pooling": roofs(report.pooling),
        "tp_sizes": [dataclasses.asdict(item) for item in report.tp_sizes],
        "best_tp": report.best.tp if report.best is not None else None,
        "best_flags": report.best.flags if report.best is not None else None,
        "reason": report.reason,
    }
    return plan_json(report.plan, compiled, value)


def plan_json(plan: MemoryPlan, compiled: CompiledPlan | None, value: dict[str, object] | None = None) -> str:
    """Returns a plan, or `value` in its place, and the compiler's results as JSON."""
    value = value if value is not None else dataclasses.asdict(plan)
    if compiled is not None:
        value["programs"] = [dataclasses.asdict(report) for report in compiled.reports]
        value["compiled_max_pages"], value["faults"] = compiled.max_pages, compiled.faults
    return json.dumps(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of the command besides those of a server, whose `model` may also name a published size."""

    config: ServeConfig
    target: str
    tensor_parallelism: int = 0  # 0 uses every device of the target
    length: int = 1024
    batches: tuple[int, ...] = (1, 32, 256)
    jax_fraction: float = 0.0
    is_compiled: bool = False
    is_json: bool = False


def planner_of(asked: PlanRequest) -> Planner:
    """Returns the planner of a command.

    Raises:
      MeshserveError: The model does not exist, or an option is out of range.
      ValueError: The target does not exist, or the model cannot be split over this number of devices.
    """
    machine = target(asked.target)
    if min(asked.length, *asked.batches) < 1:
        got = f"length is {asked.length} and batch {', '.join(map(str, asked.batches))}"
        raise ConfigError(f"{got}; they must be 1 or more.")
    if not 0.0 <= asked.jax_fraction <= 1.0:
        raise ConfigError(f"jax_fraction is {asked.jax_fraction}; it must be 0 to 1, where 0 is JAX's default.")
    model = _model(asked.config)
    check_tp(asked.tensor_parallelism or machine.num_devices, model, machine.num_devices, f"devices in {machine.name}")
    return Planner.on(
        machine,
        with_local_adapters(asked.config, has_weights=False),
        model,
        num_devices=asked.tensor_parallelism or machine.num_devices,
        jax_fraction=asked.jax_fraction,
    )


def run_plan(asked: PlanRequest) -> int:
    """Runs the command and returns its exit status, which is 1 if an expectation about a program failed.

    Raises:
      MeshserveError, ValueError: The model or target does not exist, or an option is out of range.
      MemoryError: The model does not fit on the target.
    """
    jax.config.update("jax_platforms", "cpu")  # no program runs on an accelerator
    planner = planner_of(asked)
    if asked.is_compiled and planner.target.chip.platform == "cpu":
        raise ConfigError(f"--compile needs a target with TPUs or GPUs, but the target is {asked.target}. Omit it.")
    report = make_report(planner, length=asked.length, batches=asked.batches)
    compiled = None
    if not asked.is_json:
        print(report_text(report), flush=True)
    if asked.is_compiled:
        try:
            compiled = compile_plan(planner) if asked.is_json else compile_with_table(planner)
        except NoCompilerError as error:
            raise ConfigError(str(error)) from None
    if asked.is_json:
        print(report_json(report, compiled))
    return 1 if compiled is not None and compiled.faults else 0


def compile_with_table(
    planner: Planner, known: dict[KnownKey, ProgramReport] | None = None, *, has_all_layers: bool = True
) -> CompiledPlan:
    """Compiles like `compile_plan`, and prints a line per program, the cache size and the failed expectations."""
    print(REPORT_HEAD, flush=True)
    compiled = compile_plan(
        planner, lambda program: print(report_row(program), flush=True), known, has_all_layers=has_all_layers
    )
    print(f"  pages: {compiled.plan.max_pages} planned, {compiled.max_pages} compile ({compiled.deviation:+.2%})")
    holds = "every other expectation holds" if compiled.left_out else "every expectation holds"
    for what in compiled.left_out:
        print(f"  not checked, because it needs all layers: {what}")
    print("\n".join(compiled.faults) or f"  {holds}", flush=True)
    return compiled


def _model(config: ServeConfig) -> ModelConfig:
    if is_published(config.model):
        model = named_model(config.model, config.quantize, fp8_head=config.fp8_head)
        return with_task(model, config.task, Path(model_directory(DEMO_MODEL)))
    files = find_model(config.model, revision=config.revision, random_weights=True)  # downloads no weights
    model = read_model(files.small / "config.json", config.quantize, fp8_head=config.fp8_head)
    if config.strict_config:
        model.notes.check_empty()
    model.notes.log()
    return with_task(model, config.task, files.small)
