"""Makes a static HTML page of plots and tables from the figures that `bench serve --json` wrote.

    meshserve bench serve --concurrency 1 4 16 64 --json results/h200.json
    meshserve bench report results/*.json --output report.html

Each file is one line in each plot, named after the file, so that servers, machines or releases can be compared. The
page needs no other file and no network. Needs the extra `plots`.
"""

import argparse
import html
import importlib.util
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshserve.runtime.api.errors import ConfigError

Load = Mapping[str, Any]  # the figures of one load; see `serving_report.Figures`

# A plot: its title, those of its axes, and the figure of a load on each axis.
Plot = tuple[str, str, str, Callable[[Load], float], Callable[[Load], float]]
_PLOTS: tuple[Plot, ...] = (
    (
        "Throughput against time per output token",
        "median time per output token (ms)",
        "output tokens/s",
        lambda load: load["tpot"]["median"],
        lambda load: load["output_throughput"],
    ),
    (
        "Throughput against time to first token",
        "median time to first token (ms)",
        "output tokens/s",
        lambda load: load["ttft"]["median"],
        lambda load: load["output_throughput"],
    ),
    (
        "Time to first token, 99 % of requests",
        "peak number of open requests",
        "P99 time to first token (ms)",
        lambda load: load["max_concurrent_requests"],
        lambda load: load["ttft"]["p99"],
    ),
    (
        "Time per output token, 99 % of requests",
        "peak number of open requests",
        "P99 time per output token (ms)",
        lambda load: load["max_concurrent_requests"],
        lambda load: load["tpot"]["p99"],
    ),
)
# The columns of the tables: title, and the figure of a load.
_COLUMNS: tuple[tuple[str, Callable[[Load], Any]], ...] = (
    ("load", lambda load: load["load"]),
    ("requests", lambda load: load["completed"]),
    ("failed", lambda load: load["failed"]),
    ("requests/s", lambda load: load["request_throughput"]),
    ("output tokens/s", lambda load: load["output_throughput"]),
    ("TTFT median (ms)", lambda load: load["ttft"]["median"]),
    ("TTFT P99 (ms)", lambda load: load["ttft"]["p99"]),
    ("TPOT median (ms)", lambda load: load["tpot"]["median"]),
    ("TPOT P99 (ms)", lambda load: load["tpot"]["p99"]),
    ("E2EL median (ms)", lambda load: load["e2el"]["median"]),
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222 }
h1, h2 { font-weight: 600 } svg { width: 100%; height: auto }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1rem }
table { border-collapse: collapse; width: 100% } th, td { padding: .3rem .6rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #ddd } .failed { color: #b00020 }
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("bench report needs matplotlib. Install meshserve with the extra [plots].")
    results = {path.stem: read(path) for path in options.results}
    try:
        options.output.write_text(page(options.title, results), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {options.output} cannot be written: {error.strerror}.") from None
    print(f"wrote {options.output}")
    return 0


def read(path: Path) -> list[Load]:
    """Reads the loads of one file.

    Raises:
      ConfigError: The file cannot be read, or is not what `bench serve --json` writes.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        loads = found["loads"] if isinstance(found, dict) else found
        for load in loads:
            for _, figure in _COLUMNS:
                figure(load)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not hold the figures of `meshserve bench serve --json` ({type(error).__name__}: {error})."
        ) from None
    if not loads:
        raise ConfigError(f"{path} holds no load.")
    return list(loads)


def page(title: str, results: Mapping[str, Sequence[Load]]) -> str:
    """Returns the page for the loads of each file."""
    plots = "".join(f"<figure>{_svg(results, each)}</figure>" for each in _PLOTS)
    tables = "".join(f"<h2>{html.escape(name)}</h2>{_table(loads)}" for name, loads in results.items())
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>Made {made} by meshserve bench report. "
        "TTFT: time to first token. TPOT: time per output token after it. E2EL: whole time of a request. Failed "
        f'requests count in no other figure.</p><div class="plots">{plots}</div>{tables}</body></html>\n'
    )


def _svg(results: Mapping[str, Sequence[Load]], plot: Plot) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    _draw(figure.subplots(), results, plot)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw(axes: Any, results: Mapping[str, Sequence[Load]], plot: Plot) -> None:
    """Draws a plot with a line for each file. Loads without a figure are left out."""
    title, across, up, x, y = plot
    for name, loads in results.items():
        points = [(x(load), y(load)) for load in loads if load["completed"]]
        points = sorted(point for point in points if not any(map(math.isnan, point)))
        axes.plot([point[0] for point in points], [point[1] for point in points], marker="o", label=name)
    axes.set(title=title, xlabel=across, ylabel=up, xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _table(loads: Sequence[Load]) -> str:
    titles = "".join(f"<th>{title}</th>" for title, _ in _COLUMNS)
    rows = "".join(
        f"<tr{' class=failed' if load['failed'] else ''}>{''.join(_cell(figure(load)) for _, figure in _COLUMNS)}</tr>"
        for load in loads
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"<td>{'-' if math.isnan(value) else f'{value:,.1f}'}</td>"
    return f"<td>{html.escape(str(value))}</td>"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench report", description="Make a page of plots from the figures of bench serve."
    )
    parser.add_argument("results", type=Path, nargs="+", help="files that bench serve --json wrote")
    parser.add_argument("--output", type=Path, default="report.html", help="page to write (default: %(default)s)")
    parser.add_argument("--title", default="Serving benchmark", help="title of the page (default: %(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
