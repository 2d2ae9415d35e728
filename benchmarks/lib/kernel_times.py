"""Lists the kernels that took the device's time, from its profile."""

import collections
from pathlib import Path

import jax


def kernel_table(folder: Path, *, num_steps: int = 1, num_rows: int = 30) -> str:
    """Formats the kernels of a profile by their time: milliseconds, calls, name. Overlapping kernels count in full.

    Args:
      folder: The folder that `jax.profiler.trace` wrote to.
      num_steps: Number of steps in the profile; times and calls are given per step.
    """
    total: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
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
    rows = [
        f"{ns / 1e6 / num_steps:9.3f} ms {calls[name] / num_steps:7.1f}  {name[:100]}"
        for name, ns in total.most_common(num_rows)
    ]
    return "\n".join([f"{sum(total.values()) / 1e6 / num_steps:9.3f} ms in kernels", *rows])
