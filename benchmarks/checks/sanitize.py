"""Runs GPU tests of the CUDA kernels under NVIDIA's compute-sanitizer and fails on reports that are not known.

    make sanitize                                                     # every tool and suite
    python -m meshserve.benchmarks.checks.sanitize --tools racecheck --suites prefill

memcheck finds accesses outside an allocation, racecheck conflicting accesses to shared memory, synccheck wrong use of
barriers. Every buffer is an allocation of its own (XLA_PYTHON_CLIENT_ALLOCATOR=platform), so that an access beyond it
is seen. Only this project's kernels are watched. nan-fill finds reads of memory that was never written: the tests run
without the sanitizer, in memory full of NaN (`nan_fill`). initcheck, the sanitizer's tool for that, can be asked for,
but does not see what XLA's kernels have written, and does not end one jitted program in a minute.
Each suite runs in a process of its own: if one is lost, its name and exit status are reported, and the rest runs.
`KNOWN` lists the reports that are expected, with the reason for each.
"""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "nan-fill")
_CHOICES = (*TOOLS, "initcheck")
_KERNELS = "kernel_substring=meshserve"  # a part of the name of every kernel of ours, mangled or not
_FILLED_FRACTION = "0.1"  # share of the GPU's memory for the tests that run in memory full of NaN
_FOUND = 86  # exit status that compute-sanitizer returns after a report
_REPORT = re.compile(
    r"^=+ (?:Error: |Warning: )?(Invalid|Uninitialized|Race reported|Potential|Barrier|Divergent)(.*)$"
)

# A file and a -k expression each, for tests of odd shapes: uneven lengths, padding, head sizes, groups, cut contexts.
SUITES: dict[str, tuple[str, str]] = {
    "decode": (
        "tests/kernels/test_decode_layers_gpu.py",
        "whole_stack and (page-borders or padding-rows or group-1 or head-64 or batch-50 or batch-200 or uneven)",
    ),
    "decode-parts": ("tests/kernels/test_decode_layers_gpu.py", "test_parts and (padding-rows or head-64-group-7)"),
    "heads": ("tests/kernels/test_qk_norm_rope_gpu.py", ""),
    "prefill": (
        "tests/kernels/test_paged_attention_gpu.py",
        "cuda and float64 and (head-64 or more-tiles or parts or block-borders) and not 16384",
    ),
    "portable": (
        "tests/kernels/test_paged_attention_gpu.py",
        "portable and float64 and (head-64 or more-tiles or parts or block-borders) and not 16384",
    ),
    "few-tokens": (
        "tests/kernels/test_few_tokens_gpu.py",
        "float64 and (fp8-block-of-a-shard or int4-32) and (1- or 13 or 64)",
    ),
    "experts": (
        "tests/kernels/test_experts_gpu.py",
        "float64 and (one-token or padding or broken-lanes or a-block or few-and-skewed or (many and sixteen))",
    ),
    "portable-experts": (
        "tests/kernels/test_experts_sm80_gpu.py",
        "float64 and (one-token or padding or broken-lanes or a-block or fp8-blocks or int4-64-zero)",
    ),
    "threshold": ("tests/kernels/test_threshold_gpu.py", "keeps_what and 50257"),
    "p2p": ("tests/kernels/test_p2p_on_one_gpu.py", "64-300 and (shot-2 or shots-2)"),
}


@dataclasses.dataclass(frozen=True)
class Known:
    """An expected report: the tool, patterns of its text and of the lines below it, and why it is no fault."""

    tool: str
    pattern: str
    reason: str


KNOWN = (
    Known(
        "racecheck",
        r"Race reported.*prefill",
        "The prefill kernel hands `memory.item` from the fetching warp to the others through mbarriers: written after "
        "a wait on `q_empty`, read after a wait on `q_full`, whose arrivals and waits have acquire and release "
        "semantics. A warp's first lane arrives for all of its lanes after __syncwarp. racecheck follows neither. In "
        "the machine code, the pairs it names are the loads of the item after the wait, and the stores of the item.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one tool said of one suite."""

    unknown: Counter[str]  # reports that are not in KNOWN, by their first line
    num_known: int
    problem: str  # why the tests themselves failed or were lost; empty if they passed
    tail: str  # the last lines of the output


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if there is an unknown report, or if a suite was lost or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=_CHOICES, default=list(TOOLS))
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each tool and suite")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH. It is part of NVIDIA's CUDA toolkit.", file=sys.stderr)
        return 2
    is_clean = True
    for tool in options.tools:
        for suite in options.suites:
            started = time.monotonic()
            outcome = run(tool, suite, options.timeout)
            is_clean = is_clean and not outcome.unknown and not outcome.problem
            print(
                f"{tool:10} {suite:13} {outcome.unknown.total()} unknown, {outcome.num_known} known reports"
                f"{', ' + outcome.problem if outcome.problem else ''} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
            for report, count in outcome.unknown.most_common(5):
                print(f"    {count} x {report}", flush=True)
            if outcome.problem:
                print("    " + outcome.tail.replace("\n", "\n    "), flush=True)
    return 0 if is_clean else 1


def run(tool: str, suite: str, timeout: float) -> Outcome:
    """Runs one suite under one tool."""
    path, expression = SUITES[suite]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-x", "-p", "no:cacheprovider", path]
    command += ["-k", expression] if expression else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if tool == "nan-fill":
        command += ["-p", "meshserve.benchmarks.checks.nan_fill"]
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = _FILLED_FRACTION
    else:
        environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        command = [
            "compute-sanitizer", "--tool", tool, "--kernel-name", _KERNELS, "--target-processes", "all",
            "--error-exitcode", str(_FOUND), "--print-limit", "1000", *command,
        ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Outcome(Counter(), 0, f"not done after {timeout:.0f} s", "")
    output = done.stdout + done.stderr
    unknown, num_known = classify(tool, output)
    return Outcome(unknown, num_known, problem(done.returncode, output), "\n".join(output.splitlines()[-12:]))


def classify(tool: str, output: str) -> tuple[Counter[str], int]:
    """Sorts a tool's reports into unknown ones, by their first line, and the number of known ones."""
    unknown: Counter[str] = Counter()
    num_known = 0
    lines = output.splitlines()
    for index, line in enumerate(lines):
        if _REPORT.match(line) is None:
            continue
        text = "\n".join(lines[index : index + 12])
        if any(known.tool == tool and re.search(known.pattern, text, re.DOTALL) for known in KNOWN):
            num_known += 1
        else:
            unknown[" ".join(line.strip("= ").split())] += 1
    return unknown, num_known


def problem(status: int, output: str) -> str:
    """Returns why the tests did not pass, or an empty string. Reports alone are no problem of the tests."""
    if re.search(r"^\d+ passed", output, re.MULTILINE) and status in (0, _FOUND):
        return ""
    return f"lost or failed with exit status {status}"


if __name__ == "__main__":
    raise SystemExit(main())
