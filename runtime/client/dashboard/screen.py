"""The screen of `meshserve top`, from the latest readings. In: readings. Out: what rich draws."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from ...api.engine_api import ModelInfo
from .readings import Interval, Reading

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 48
_UNKNOWN = "-"
_HEADER_LINES, _LOAD_LINES, _HINT_LINES = 4, 8, 2
_WINDOW_SECONDS = 10.0  # over which rates and quantiles are computed

# Histograms of the table of times, with their titles.
_TIMES = (
    ("first token", "meshserve_time_to_first_token_seconds"),
    ("between tokens", "meshserve_inter_token_seconds"),
    ("whole request", "meshserve_request_seconds"),
    ("queue", "meshserve_queue_seconds"),
    ("step", "meshserve_step_seconds"),
    ("step, host part", "meshserve_step_host_seconds"),
)
_TIMES_LINES = len(_TIMES) + 3  # with the titles and the frame
SCREEN_LINES = _HEADER_LINES + _LOAD_LINES + _TIMES_LINES + _HINT_LINES


def screen(target: str, info: ModelInfo | None, readings: Sequence[Reading], hint: str = "") -> Layout:
    """Returns the whole screen. `readings` are in order of time, and not empty."""
    readings = list(readings)
    latest = readings[-1]
    window = Interval(_start_of_window(readings), latest)
    layout = Layout()
    layout.split_column(
        Layout(_header(target, info, latest), size=_HEADER_LINES),
        Layout(name="load", size=_LOAD_LINES),
        Layout(_times(window), size=_TIMES_LINES),
        Layout(Text(hint, style="dim"), size=_HINT_LINES),
    )
    layout["load"].split_row(Layout(_requests(window, latest)), Layout(_tokens(window, readings)))
    return layout


def _start_of_window(readings: Sequence[Reading]) -> Reading:
    """Returns the first reading of the window: at least the one before the latest."""
    recent = [reading for reading in readings[:-1] if reading.seconds >= readings[-1].seconds - _WINDOW_SECONDS]
    return recent[0] if recent else readings[max(len(readings) - 2, 0)]


def _header(target: str, info: ModelInfo | None, latest: Reading) -> Panel:
    style = "bold green" if latest.state == "READY" else "bold yellow"
    first = Text.assemble((latest.state or "?", style), "  ", (target, "bold"))
    uptime = latest.values.get("meshserve_uptime_seconds")
    if uptime is not None:
        first.append(f"  up {_duration(uptime)}")
    second = Text(_UNKNOWN)
    if info is not None:
        second = Text(
            f"{info.name} ({info.size} parameters, {info.quantization or info.dtype}) on "
            f"{info.num_devices} x {info.device_kind}, TP size {info.tp_size}, context {info.max_context_tokens:,}"
        )
    if adapters := latest.values.get("meshserve_adapters"):
        on_devices = latest.values.get("meshserve_device_adapters", 0.0)
        second.append(f"; adapters: {adapters:.0f}, {on_devices:.0f} on the devices")
    return Panel(Group(first, second), title="meshserve top", title_align="left")


def _requests(window: Interval, latest: Reading) -> Panel:
    table = _grid(len("prefix hits"))
    load = latest.load
    table.add_row("running", str(load.num_running) if load else _UNKNOWN)
    table.add_row("waiting", str(load.num_waiting) if load else _UNKNOWN)
    ended = {
        outcome: count - window.before.outcomes.get(outcome, 0.0)
        for outcome, count in latest.outcomes.items()
        if latest.outcomes[outcome]
    }
    seconds = window.after.seconds - window.before.seconds
    shown = ", ".join(f"{outcome} {count / seconds:.1f}" for outcome, count in ended.items()) if seconds > 0 else ""
    table.add_row("ended/s", shown or _UNKNOWN)
    table.add_row("preempted/s", _number(window.rate("meshserve_preemptions_total"), "{:.1f}"))
    table.add_row("prefix hits", _number(_hits(window), "{:.0%}"))
    used = 1.0 - load.num_free_pages / load.num_pages if load and load.num_pages else None
    cache: RenderableType = Text(_UNKNOWN)
    if load and used is not None:
        cache = Table.grid(Column(ratio=1), Column(no_wrap=True), expand=True)
        cache.add_row(ProgressBar(total=1.0, completed=used), f" {used:.0%} of {load.num_pages:,} pages")
    table.add_row("KV cache", cache)
    return Panel(table, title="requests", title_align="left")


def _hits(window: Interval) -> float | None:
    return window.share("meshserve_cached_tokens_total", "meshserve_admitted_tokens_total")


def _tokens(window: Interval, readings: Sequence[Reading]) -> Panel:
    output = "meshserve_output_tokens_total"
    table = _grid(len("running requests"))
    table.add_row("output tokens/s", _number(window.rate(output), "{:,.0f}"))
    table.add_row("prompt tokens/s", _number(window.rate("meshserve_prompt_tokens_total"), "{:,.0f}"))
    table.add_row("steps/s", _number(window.rate("meshserve_steps_total"), "{:,.0f}"))
    table.add_row("slots in use", _number(window.mean("meshserve_batch_occupancy_ratio"), "{:.0%}"))
    pairs = [Interval(before, after) for before, after in zip(readings, readings[1:], strict=False)]
    table.add_row("output tokens/s", _spark(pairs, lambda change: change.rate(output)))
    running = [float(reading.load.num_running) if reading.load else None for reading in readings]
    table.add_row("running requests", _sparkline(running))
    return Panel(table, title="throughput", title_align="left")


def _times(window: Interval) -> Panel:
    table = Table(box=None, expand=True)
    for title in ("ms", "mean", "P50", "P90", "P99"):
        table.add_column(title, justify="left" if title == "ms" else "right")
    for title, name in _TIMES:
        figures = [window.mean(name), *(window.quantile(name, fraction) for fraction in (0.5, 0.9, 0.99))]
        table.add_row(title, *(_number(figure, "{:,.1f}", 1e3) for figure in figures))
    return Panel(table, title=f"times, of the last {_WINDOW_SECONDS:.0f} s", title_align="left")


def _grid(name_columns: int) -> Table:
    """Returns an empty table of names and figures. Narrow terminals cut the figures, not the names."""
    names, figures = Column(style="cyan", width=name_columns), Column(no_wrap=True, ratio=1)
    return Table.grid(names, figures, padding=(0, 2), expand=True)


def _spark(changes: Sequence[Interval], figure: Callable[[Interval], float | None]) -> Text:
    return _sparkline([figure(change) for change in changes])


def _sparkline(figures: Sequence[float | None]) -> Text:
    shown = figures[-_SPARK_COLUMNS:]
    most = max((figure for figure in shown if figure is not None), default=0.0) or 1.0
    bars = (" " if figure is None else _BARS[round(figure / most * (len(_BARS) - 1))] for figure in shown)
    return Text("".join(bars), style="green")


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return _UNKNOWN if value is None else form.format(scale * value)


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"
