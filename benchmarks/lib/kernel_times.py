"""Lists the kernels that took the device's time, and how long it had none, from its profile."""

import collections
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

_GAP_NS = 50_000


def kernel_table(
    folder: Path,
    *,
    num_steps: int = 1,
    num_rows: int = 30,
    gap_ns: int = _GAP_NS,
    window: tuple[float, float] = (math.inf, 0.0),
) -> str:
    """Formats the kernels of a profile by their time: milliseconds, calls, name.

    A kernel counts from the end of the one that ended before it, if it began earlier: a kernel that is launched early
    waits for that one.

    Args:
      folder: The folder that `jax.profiler.trace` wrote to.
      num_steps: Number of steps in the profile; times and calls are given per step.
      num_rows: Number of kernels to list.
      gap_ns: Gaps of this length and more are counted.
      window: Only kernels that end between these two numbers of seconds before the last one's end count. Default: all.
    """
    total: dict[str, float] = collections.defaultdict(float)
    calls: collections.Counter[str] = collections.Counter()
    idle = []
    profile = jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    for plane in profile.planes:
        if not plane.name.startswith("/device:"):
            continue
        spans = []
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            spans += [(event.start_ns + event.duration_ns, event.start_ns, event.name) for event in line.events]
        spans = within(spans, window)
        ended = 0.0
        for end, start, name in spans:
            calls[name] += 1
            total[name] += end - max(start, ended)
            ended = end
        if spans:
            idle.append(f"{plane.name}: {idle_text(((start, end) for end, start, _ in spans), gap_ns)}")
    rows = [
        f"{ns / 1e6 / num_steps:9.3f} ms {calls[name] / num_steps:7.1f}  {name[:100]}"
        for name, ns in sorted(total.items(), key=lambda item: -item[1])[:num_rows]
    ]
    return "\n".join([*idle, f"{sum(total.values()) / 1e6 / num_steps:9.3f} ms in kernels", *rows])


def within(spans: Sequence[tuple[float, float, str]], window: tuple[float, float]) -> list[tuple[float, float, str]]:
    """Returns the kernels (end, start, name; nanoseconds) of a window, see `kernel_table`, by their ends."""
    ordered = sorted(spans)
    first, last = (1e9 * seconds for seconds in window)
    return [span for span in ordered if last <= ordered[-1][0] - span[0] <= first]


def idle_text(spans: Iterable[tuple[float, float]], gap_ns: int = _GAP_NS) -> str:
    """Says how much of a device's time no kernel was running.

    Args:
      spans: Beginning and end of each kernel, in nanoseconds.
      gap_ns: Gaps of this length and more are counted; shorter ones are the launch of the next kernel.
    """
    ordered = sorted(spans)
    begin, end = ordered[0]
    gaps = []
    for start, stop in ordered:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
    long = [gap for gap in gaps if gap > gap_ns]
    return (
        f"of {(end - begin) / 1e6:.1f} ms, {sum(gaps) / 1e6:.1f} ms without a kernel; "
        f"{len(long)} gaps over {gap_ns / 1e3:.0f} us, {sum(long) / 1e6:.1f} ms together"
    )
