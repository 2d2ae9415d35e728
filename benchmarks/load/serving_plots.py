"""Plots a load: times to first token, gaps, tokens per second, and open requests. Needs the extra [plots]."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .serving_report import Call, open_requests, tokens_by_second


def plot(loads: Mapping[str, Sequence[Call]], path: Path) -> None:
    """Writes a PNG with four panels, one line per load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    first, gaps, tokens, num_open = figure.subplots(2, 2).flat
    for name, calls in loads.items():
        good = [call for call in calls if not call.error and call.messages]
        _shares(first, [1e3 * call.ttft for call in good], name)
        _shares(gaps, [1e3 * gap for call in good for gap in call.gaps], name)
        tokens.plot(tokens_by_second(good), label=name)
        steps = open_requests(calls)
        num_open.step([time for time, _ in steps], [number for _, number in steps], where="post", label=name)
    _label(first, "Time to first token", "ms", "share of requests")
    _label(gaps, "Between messages", "ms", "share of gaps")
    _label(tokens, "Output tokens per second", "s", "tokens/s")
    _label(num_open, "Open requests", "s", "requests")
    figure.savefig(path)


def _shares(axes: Any, values: list[float], name: str) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", label=name)


def _label(axes: Any, title: str, across: str, up: str) -> None:
    axes.set(title=title, xlabel=across, ylabel=up, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
