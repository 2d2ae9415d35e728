"""Reads the results of the rows' processes and turns them into lines of the table."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.load.full_load import STEP_MS, WORKLOADS
from meshserve.benchmarks.load.full_load import TOKENS_PER_SECOND as SERVED_TOKENS_PER_SECOND

from .table import MS_A_TOKEN, TOKENS_PER_SECOND, Case, Line

# The most milliseconds a token that four H200s shall take (docs/performance.md).
_AIMS = {
    ("qwen3-8b", "one"): 1.5, ("qwen3-8b", "32"): 2.1, ("qwen3-32b", "one"): 4.8, ("qwen3-32b", "32"): 6.0,
}  # fmt: skip
AIMS_TP = 4

Results = Sequence[Path]


@dataclasses.dataclass(frozen=True)
class Served:
    """A model behind a server, with workloads of `bench full_load`."""

    name: str
    model: str
    tp: int
    workloads: tuple[str, ...]
    limit_seconds: float
    _: dataclasses.KW_ONLY
    quantize: str = ""
    expert_parallel: bool = False

    @property
    def title(self) -> str:
        split = "EP" if self.expert_parallel else "TP"
        return f"{self.model}{' FP8' if self.quantize else ''}, {split} {self.tp}"


def _loaded(results: Results) -> Any:
    return json.loads(results[0].read_text())


def read_tests(name: str, results: Results) -> list[Line]:
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for result in results:
        for suite in ElementTree.parse(result).getroot().iter("testsuite"):
            for key in counts:
                counts[key] += int(suite.get(key, 0))
    num_bad = counts["failures"] + counts["errors"]
    note = f"of {counts['tests']}, {counts['skipped']} skipped"
    return [Line(row=name, workload="tests of the kernels", figure="failed", value=num_bad, note=note)]


def read_sums(results: Results) -> list[Line]:
    lines = []
    for row in _loaded(results):
        tp, kilobytes = row["shape"]["tp"], row["shape"]["kilobytes"]
        workload = f"all-reduce over {tp}, {kilobytes:.0f} KB, {row['implementation']}"
        lines.append(Line(row="all-reduces", workload=workload, figure="us", value=round(row["us"], 1)))
    return lines


def read_check_sums(results: Results) -> list[Line]:
    return [
        Line(
            row="check-all-reduces",
            workload=f"all-reduces over {row['tp']}, {row['implementation']}",
            figure="wrong elements",
            value=row["num_wrong"],
            note=f"of {row['num_sums']:,} all-reduces",
        )
        for row in _loaded(results)
    ]


def read_check_steps(results: Results) -> list[Line]:
    return [
        Line(
            row="check-steps",
            workload=f"{row['model']}, TP {row['tp']}, batch {row['batch']}",
            figure="changed elements",
            value=row["num_changed"],
            note=f"{row['num_steps']:,} steps, {row['num_unlike']} unlike between devices",
        )
        for row in _loaded(results)
    ]


def read_soak(results: Results) -> list[Line]:
    report = _loaded(results)
    note = f"{sum(report['ended'].values()):,} requests, {report['tokens']:,} tokens; clean: {report['is_clean']}"
    return [
        Line(row="check-load", workload="mixed load", figure="late compiles", value=report["late_compiles"], note=note)
    ]


def read_served(served: Served, case: Case, results: Results) -> list[Line]:
    [found] = _loaded(results).values()
    lines = []
    for name in served.workloads:
        workload = WORKLOADS[served.model][name]
        lines += _served_lines(served, case, name, found, workload.title)
    if not lines:  # a dry run, whose workload is another one
        [title] = [title for title in found["ours"]["figures"] if title != "the server"]
        lines = _served_lines(served, case, served.workloads[0], found, title)
    return lines


def _served_lines(served: Served, case: Case, name: str, found: Mapping[str, Any], title: str) -> list[Line]:
    figures = {engine: each["figures"].get(title, {}) for engine, each in found.items()}
    works = WORKLOADS[served.model][name].draw(0)
    batch, num_in, num_out = len(works), len(works[0].prompt_token_ids), works[0].max_tokens
    aim = _AIMS.get((served.model, name)) if (served.tp, served.quantize) == (AIMS_TP, "") else None
    lines = []
    for key, figure in ((STEP_MS, MS_A_TOKEN), (SERVED_TOKENS_PER_SECOND, TOKENS_PER_SECOND)):
        if key not in figures.get("ours", {}):
            continue
        is_rate = figure == TOKENS_PER_SECOND
        line = Line(
            row=served.name,
            workload=f"{served.title}, {title}",
            figure=figure,
            value=figures["ours"][key],
            vllm=figures.get("vllm", {}).get(key),
            ideal=case.tokens_per_second(batch, num_in, num_out)
            if is_rate
            else case.step_ms(batch, num_in + num_out // 2),
            aim=None if is_rate else aim,
            all_reduces=case.all_reduces(batch),
        )
        lines.append(line)
    return lines


def read_steps(name: str, served: Served, case: Case, all_reduce: str, results: Results) -> list[Line]:
    return [
        Line(
            row=name,
            workload=f"{served.title}, steps alone, batch {row['batch']}",
            figure=MS_A_TOKEN,
            value=row["step_ms"],
            ideal=case.step_ms(row["batch"], row["context"]),
            all_reduces=case.all_reduces(row["batch"]),
            note=f"all-reduce {all_reduce}, host {row['dispatch_ms']:.2f} ms, {row['starved_steps']:.0%} starved",
        )
        for row in _loaded(results)
    ]


def read_live_tp(name: str, results: Results) -> list[Line]:
    report = _loaded(results)
    changes = ", ".join(
        f"to {change['tp']} after {change['seconds']:.1f} s, paused {change['paused_seconds']} s"
        for change in report["changes"]
    )
    note = f"of {report['num_ended']}, {report['num_different']} with other tokens; {changes}"
    workload = f"live change of the TP size, {report['model']}, {report['dtype']}"
    return [Line(row=name, workload=workload, figure="streams lost", value=report["num_lost"], note=note)]
