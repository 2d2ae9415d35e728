"""Compares the device memory that a server uses with the prediction of `meshserve plan`.

    python benchmarks/checks/plan_check.py --model qwen3-0.6b --random-weights --target h100:1
    python benchmarks/checks/plan_check.py --model qwen3-8b --target h100:1 --log server.log

Starts an engine as `meshserve serve` would and compares its figures with the plan's, or reads the figures from the log
of a server that was started with the same options. Accepts all options of `serve` that change shapes. Exits with 1 if a
byte count differs by more than 2 %, or the number of programs differs at all. The scratch difference is relative to the
whole device memory, because the compiler decides the scratch size and it is small.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from meshserve.runtime.options.flags import Parser, add_options, serve_config
from meshserve.runtime.options.serve_config import ServeConfig, server_only_options
from meshserve.runtime.plan.report import PlanRequest, planner_of
from meshserve.runtime.program.device_figures import FIGURES_IN_LOG, DeviceFigures
from meshserve.runtime.startup.launch import build_runner, open_model

_TOLERANCE = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    config = serve_config(options)
    config = dataclasses.replace(config, tp=config.tp or 1)
    asked = PlanRequest(
        config=config, target=options.target, tensor_parallelism=config.tp, jax_fraction=options.jax_fraction
    )
    planner = planner_of(asked)
    planned = planner.plan().figures
    if options.log is not None:
        measured = figures_in(options.log)
    else:
        measured = start(config)
    rows = list(compare(planned, measured))
    print(f"{config.model} on {options.target}, tp {config.tp}, per device:")
    print(f"{'':<16}{'planned':>18}{'measured':>18}{'difference':>12}")
    for row in rows:
        print(
            f"{row.name:<16}{row.planned:>18,}{row.measured:>18,}{row.difference:>+12.2%}{'' if row.is_well else '  !'}"
        )
    return 0 if all(row.is_well for row in rows) else 1


def _parser() -> Parser:
    parser = Parser(prog="plan_check", description="Compare a plan with the figures measured at start.")
    add_options(parser, left_out=server_only_options())
    parser.add_argument("--target", required=True, help="as for `meshserve plan`")
    parser.add_argument("--jax-fraction", type=float, default=0.0, help="as for `meshserve plan`")
    parser.add_argument("--log", type=Path, help="read the figures from this server log instead of starting an engine")
    return parser


def figures_in(log: Path) -> DeviceFigures:
    """Returns the figures of the last start in a server's log.

    Raises:
      ValueError: The log has no figures.
    """
    lines = [line for line in log.read_text().splitlines() if FIGURES_IN_LOG in line]
    if not lines:
        raise ValueError(
            f"{log} has no line with {FIGURES_IN_LOG!r}; use a text log (not JSON) of a server that became ready."
        )
    return DeviceFigures(**json.loads(lines[-1].partition(FIGURES_IN_LOG)[2]))


def start(config: ServeConfig) -> DeviceFigures:
    """Returns the figures of a server after preparing it."""
    model, make_params = open_model(config.model, random_weights=config.random_weights)
    runner, *_ = build_runner(config, model, make_params)
    return runner.figures


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure, planned and measured."""

    name: str
    planned: int
    measured: int
    whole: int  # the denominator of the difference

    @property
    def difference(self) -> float:
        return (self.planned - self.measured) / self.whole if self.planned != self.measured else 0.0

    @property
    def is_well(self) -> bool:
        return abs(self.difference) <= (0.0 if self.name == "num_programs" else _TOLERANCE)


def compare(planned: DeviceFigures, measured: DeviceFigures) -> list[Row]:
    """Returns one row per figure and one for the cache, without figures that are zero on both sides."""
    whole = measured.limit_bytes or measured.weight_bytes + measured.scratch_bytes + measured.cache_bytes
    names = [field.name for field in dataclasses.fields(DeviceFigures)] + ["cache_bytes"]
    rows = []
    for name in names:
        values = getattr(planned, name), getattr(measured, name)
        if any(values):
            rows.append(Row(name, *values, whole if name == "scratch_bytes" else max(values[1], 1)))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
