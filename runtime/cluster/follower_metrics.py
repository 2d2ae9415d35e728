"""Prometheus metrics of a follower: whether it replays, how much, and how recently. Process 0 counts the requests.

Metrics that mean "accepts requests" are not exported here, because alerts and autoscalers sum them over all pods.
"""

from collections.abc import Iterator

from ..telemetry.metrics import family_lines, labels
from .membership import Membership
from .stream_client import FollowingStats


def exposition(
    membership: Membership, stats: FollowingStats | None, *, now: float, started: float, is_ready: bool, num_late: int
) -> str:
    """Returns all metrics in Prometheus's text format, version 0.0.4.

    Args:
      membership: Place of this process in the cluster.
      stats: None until process 0 was reached.
      now: Current time on the clock of `stats`.
      started: Time at which the process started, on the same clock.
      is_ready: Whether the process replays.
      num_late: Number of programs compiled after the process was ready.
    """
    name = "meshserve_follower_info"
    who = labels(
        role="follower", process_id=str(membership.process_id), num_processes=str(membership.num_processes)
    )  # fmt: skip
    lines = [
        *family_lines(
            name, "gauge", "Role and index of this process in its cluster; the value is always 1.", [f"{name}{who} 1"]
        )
    ]
    for name, kind, text, value in _values(stats, now, started, is_ready, num_late):
        lines += family_lines(name, kind, text, [f"{name} {value}"])
    if stats is not None:
        name = "meshserve_followed_calls_total"
        samples = [f"{name}{labels(method=method)} {count}" for method, count in sorted(dict(stats.num_calls).items())]
        lines += family_lines(
            name, "counter", "Calls received from process 0, by method; the method run is a step.", samples
        )
    return "\n".join(lines) + "\n"


def _values(
    stats: FollowingStats | None, now: float, started: float, is_ready: bool, num_late: int
) -> Iterator[tuple[str, str, str, float]]:
    """Yields name, type, help text and value of each metric without labels."""
    yield (
        "meshserve_follower_ready",
        "gauge",
        "Whether the process replays the steps of process 0: 1 or 0.",
        int(is_ready),
    )
    yield "meshserve_uptime_seconds", "gauge", "Time since the server started, in seconds.", now - started
    yield (
        "meshserve_compiles_after_ready_total",
        "counter",
        "Programs compiled after the server was ready; each one is a bug that stalls all requests.",
        num_late,
    )
    if stats is None:
        return
    yield (
        "meshserve_followed_done_total",
        "counter",
        "Calls that were replayed and acknowledged.",
        stats.num_acknowledged,
    )
    yield (
        "meshserve_leader_silence_seconds",
        "gauge",
        "Time since the last message from process 0, in seconds.",
        max(0.0, now - stats.heard),
    )
    if stats.acknowledged is not None:
        age = max(0.0, now - stats.acknowledged)
        yield "meshserve_last_followed_age_seconds", "gauge", "Time since the last call was completed, in seconds.", age
