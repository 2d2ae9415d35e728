"""Draws the figures of `bench kernels`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .kernel_figures import Figure


def draw(figures: Sequence[Figure], folder: Path) -> None:
    """Draws one PNG each for latency, throughput, memory and speedup, and one with all four.

    Raises:
      SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}): install meshserve[plots].") from None
    plt.switch_backend("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    charts: dict[str, tuple[str, Callable[[Figure], float | None], bool]] = {
        "latency": ("latency of a call, ms", lambda figure: figure.ms, True),
        "throughput": ("pages read, TB/s", lambda figure: figure.terabytes_per_second, False),
        "memory": ("temporary memory, MiB", lambda figure: figure.temporary_bytes / 2**20, False),
        "speedup": ("speedup over the reference", lambda figure: figure.speedup, True),
    }
    dashboard, places = plt.subplots(2, 2, figsize=(16, 10), layout="constrained")
    for (name, (title, value, is_log)), place in zip(charts.items(), places.flat, strict=True):
        _bars(place, figures, title, value, is_log)
        alone, axes = plt.subplots(figsize=(10, 6), layout="constrained")
        _bars(axes, figures, title, value, is_log)
        alone.savefig(folder / f"{name}.png", dpi=120)
        plt.close(alone)
    dashboard.suptitle(f"Paged decode attention on {figures[0].device}")
    dashboard.savefig(folder / "dashboard.png", dpi=120)
    plt.close(dashboard)


def _bars(
    axes: Any, figures: Sequence[Figure], title: str, value: Callable[[Figure], float | None], is_log: bool
) -> None:
    """Draws a group of bars per shape, with one bar per implementation."""
    shapes = list(dict.fromkeys(figure.shape.label for figure in figures))
    names = list(dict.fromkeys(figure.implementation for figure in figures))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        points = {figure.shape.label: value(figure) for figure in figures if figure.implementation == name}
        heights = [points.get(shape) or 0.0 for shape in shapes]
        axes.bar([place + index * width for place in range(len(shapes))], heights, width, label=name)
    middles = [place + 0.4 - width / 2 for place in range(len(shapes))]
    axes.set_xticks(middles, shapes, rotation=30, ha="right", fontsize=8)
    axes.set_title(title)
    if is_log and any(value(figure) for figure in figures):
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
