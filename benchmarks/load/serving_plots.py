"""Plots loads: times to first token, gaps, throughput over time and against latency, and open requests.

Needs the extra [plots].
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .serving_report import Call, Figures, open_requests, tokens_by_second


def plot(loads: Mapping[str, Sequence[Call]], figures: Sequence[Figures], path: Path, *, title: str) -> None:
    """Writes a PNG with six panels. Four have one line per load, and two have one point per load.

    Args:
      loads: The calls of each load, by name.
      figures: The figures of the same loads.
      path: The file to write.
      title: What was measured: model, server and requests.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), layout="constrained")
    figure.suptitle(title)
    first, gaps, ttft, tokens, num_open, tpot = figure.subplots(2, 3).flat
    for name, calls in loads.items():
        good = [call for call in calls if not call.error and call.messages]
        _shares(first, [1e3 * call.ttft for call in good], name)
        _shares(gaps, [1e3 * gap for call in good for gap in call.gaps], name)
        tokens.plot(whole_seconds(tokens_by_second(good)), label=name)
        steps = open_requests(calls)
        num_open.step([time for time, _ in steps], [number for _, number in steps], where="post", label=name)
    _curve(ttft, figures, "ttft")
    _curve(tpot, figures, "tpot")
    _label(first, "Time to first token", "ms", "share of requests")
    _label(gaps, "Between messages", "ms", "share of gaps")
    _label(ttft, "Time to first token against throughput", "output tokens/s", "ms")
    _label(tokens, "Output tokens per second", "s", "tokens/s")
    _label(num_open, "Open requests", "s", "requests")
    _label(tpot, "Time per output token against throughput", "output tokens/s", "ms")
    figure.savefig(path)


def whole_seconds(counts: Sequence[int]) -> Sequence[int]:
    """Leaves out the last second, in which the load ended, unless there is no other."""
    return counts[:-1] if len(counts) > 1 else counts


def _curve(axes: Any, figures: Sequence[Figures], name: str) -> None:
    """Draws a latency against the throughput, from the load with the lowest throughput to that with the highest."""
    ordered = sorted(figures, key=lambda each: each.output_throughput)
    across = [each.output_throughput for each in ordered]
    for kind in ("median", "p99"):
        axes.plot(across, [getattr(getattr(each, name), kind) for each in ordered], marker="o", label=kind)
    for each in ordered:
        place = (each.output_throughput, getattr(each, name).median)
        axes.annotate(each.load, place, (0, 5), textcoords="offset points", ha="center", fontsize="x-small")
    axes.margins(x=0.2)  # room for the names


def _shares(axes: Any, values: list[float], name: str) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", label=name)


def _label(axes: Any, title: str, across: str, up: str) -> None:
    axes.set(title=title, xlabel=across, ylabel=up, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
