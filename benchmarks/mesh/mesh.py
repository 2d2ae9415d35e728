"""Measures everything over several GPUs of one host in one go, and prints one table.

    make bench-scaling                                             # on a machine with 2, 4 or 8 GPUs
    meshserve bench mesh --minutes 25 --python-vllm /opt/vllm/bin/python --output mesh
    meshserve bench mesh --list
    meshserve bench mesh --only mesh-tests all-reduces 8b          # a part, in this order
    meshserve bench mesh --cpu-devices 4 --minutes 10              # a dry run: the same commands, small

The rows depend on the number of GPUs and their memory; each is a process, or several, with its own time limit, so that
a hang costs one row. The tables and all figures are rewritten after each row. Exits with 1 if a row failed.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshserve.runtime.api.errors import ConfigError

from .machine import Machine, find_machine, virtual_machine
from .rows import Plan, Row
from .table import Line, heading, table
from .tasks import run_tasks

_MIN_SECONDS = 20.0  # a row with less time left is not started
_DRY_CHECK_SECONDS = 3.0


@dataclasses.dataclass(kw_only=True)
class Found:
    """What has been measured so far."""

    lines: list[Line] = dataclasses.field(default_factory=list)
    sums: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # why rows are missing, by name
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # that each row took


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rows and returns 1 if one of them failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    machine = virtual_machine(options.cpu_devices) if options.cpu_devices else find_machine()
    plan = Plan(
        machine=machine,
        check_seconds=_DRY_CHECK_SECONDS if machine.is_virtual else 60 * options.check_minutes,
        vllm=options.python_vllm,
        cache_dir=options.cache_dir,
    )
    rows, left_out = plan.rows()
    rows = _chosen(rows, left_out, options.only)
    if options.list:
        print(*(f"{row.name:18} at most {row.limit_seconds:.0f} s" for row in rows), sep="\n")
        print(*(f"{name:18} {problem}" for name, problem in left_out.items()), sep="\n")
        return 0
    found = Found(problems={} if options.only else dict(left_out))
    options.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["meshserve", "bench", "mesh", *arguments])
    has_failed = _run(rows, found, options, machine, command)
    print((options.output / "table.md").read_text() if rows else "no rows")
    return 1 if has_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshserve bench mesh", description="Measure the GPUs of one host together.")
    parser.add_argument("--output", type=Path, default=Path("mesh"), help="folder of results and logs (%(default)s)")
    parser.add_argument("--minutes", type=float, default=25.0, help="start no row after this time (%(default)s)")
    parser.add_argument(
        "--check-minutes", type=float, default=3.0, help="for checking that all-reduces are right (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="ROW", help="only these rows, in this order")
    parser.add_argument("--list", action="store_true", help="list the rows of this machine and exit")
    parser.add_argument("--python-vllm", default="", help="interpreter that has vLLM, to run it beside")
    parser.add_argument("--cache-dir", default="~/.cache/meshserve", help="of compiled programs (%(default)s)")
    parser.add_argument("--cpu-devices", type=int, default=0, help="dry run on so many virtual CPU devices")
    return parser


def _chosen(rows: list[Row], left_out: Mapping[str, str], only: Sequence[str] | None) -> list[Row]:
    """Returns the rows of `--only`.

    Raises:
      ConfigError: There is no such row.
    """
    by_name = {row.name: row for row in rows}
    for name in only or ():
        if name not in by_name:
            reason = left_out.get(name, f"there is no such row; rows are {', '.join(by_name)}")
            raise ConfigError(f"--only {name}: {reason}.")
    return [by_name[name] for name in only] if only else rows


def _run(rows: Sequence[Row], found: Found, options: argparse.Namespace, machine: Machine, command: str) -> bool:
    """Runs the rows one after the other, writes what was found after each, and returns whether one failed."""
    end = time.monotonic() + 60 * options.minutes
    has_failed = False
    for row in rows:
        limit_seconds = min(row.limit_seconds, end - time.monotonic())
        if limit_seconds < _MIN_SECONDS:
            found.problems[row.name] = "not started: no time left"
        else:
            outcome = run_tasks(row.tasks, options.output, row.name, limit_seconds)
            found.seconds[row.name] = outcome.seconds
            problem = outcome.problem
            try:
                found.lines += row.read(outcome.results) if outcome.results else []
                if row.is_sums and outcome.results:
                    found.sums = json.loads(outcome.results[0].read_text())
            except (LookupError, ValueError) as error:
                problem = f"{problem}; its results cannot be read: {error!r}"
            if problem:
                has_failed = True
                found.problems[row.name] = problem
            print(f"{row.name}: {problem or 'done'}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        _write(found, rows, options.output, machine, command)
    return has_failed


def _write(found: Found, rows: Sequence[Row], folder: Path, machine: Machine, command: str) -> None:
    tp_of = {row.name: row.tp for row in rows}
    text = heading(machine, command, found.problems) + "\n\n" + table(found.lines, found.sums, tp_of)
    (folder / "table.md").write_text(text + "\n")
    (folder / "rows.json").write_text(json.dumps(dataclasses.asdict(found), indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
