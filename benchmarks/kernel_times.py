"""Where the device's time went, by its profile."""

import collections
import math
from pathlib import Path

import jax


def kernel_table(folder: Path, *, step_ms: float | None = None, num_rows: int = 30) -> str:
    """The kernels of a profile by their time: milliseconds, calls, name. Kernels that overlap count in full.

    Args:
      folder: where `jax.profiler.trace` wrote.
      step_ms: of a row of steps that the profile holds and nothing else; times and calls are then of one step.
    """
    total: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    first_ns, last_ns = math.inf, 0.0
    profile = jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    for plane in profile.planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                total[event.name] += event.duration_ns
                calls[event.name] += 1
                first_ns, last_ns = min(first_ns, event.start_ns), max(last_ns, event.end_ns)
    num_steps = max(last_ns - first_ns, 0.0) / 1e6 / step_ms if step_ms and calls else 1.0
    rows = [
        f"{ns / 1e6 / num_steps:9.3f} ms {calls[name] / num_steps:7.1f}  {name[:100]}"
        for name, ns in total.most_common(num_rows)
    ]
    return "\n".join([f"{sum(total.values()) / 1e6 / num_steps:9.3f} ms in kernels", *rows])
