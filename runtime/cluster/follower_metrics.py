"""Prometheus metrics of a follower: whether it replays, how much, and how recently. Process 0 counts the requests.

Metrics that mean "accepts requests" are not exported here, because alerts and autoscalers sum them over all pods.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ..telemetry.metrics import late_compiles, task_failures
from .membership import Membership
from .steps import REPLAYED_METHODS
from .stream_client import FollowingStats


@dataclass(frozen=True, kw_only=True)
class FollowerState:
    """State of a follower at the time of a scrape. `stats` is None until process 0 was reached."""

    is_ready: bool  # the process replays
    num_late_compiles: int
    stats: FollowingStats | None
    num_task_failures: Mapping[str, int] = field(default_factory=dict)  # by background task


def follower_registry(
    membership: Membership, read_state: Callable[[], FollowerState], clock: Callable[[], float] = time.monotonic
) -> CollectorRegistry:
    """Returns a registry with the metrics of this process.

    Args:
      membership: Place of this process in the cluster.
      read_state: Called at each scrape.
      clock: Clock of the times in `FollowingStats`.
    """
    registry = CollectorRegistry()
    registry.register(_FollowerCollector(membership, read_state, clock))
    return registry


class _FollowerCollector(Collector):
    def __init__(self, membership: Membership, read_state: Callable[[], FollowerState], clock: Callable[[], float]):
        self._membership, self._read_state, self._clock = membership, read_state, clock
        self._started = clock()

    def collect(self) -> Iterator[Metric]:
        state, now = self._read_state(), self._clock()
        yield InfoMetricFamily(
            "meshserve_follower",
            "Role and index of this process in its cluster; the value is always 1.",
            value={
                "role": "follower",
                "process_id": str(self._membership.process_id),
                "num_processes": str(self._membership.num_processes),
            },
        )
        yield GaugeMetricFamily(
            "meshserve_follower_ready",
            "Whether the process replays the steps of process 0: 1 or 0.",
            value=int(state.is_ready),
        )
        yield GaugeMetricFamily(
            "meshserve_uptime_seconds", "Time since the server started, in seconds.", value=now - self._started
        )
        yield late_compiles(state.num_late_compiles)
        yield task_failures(state.num_task_failures)
        yield from _stream_metrics(state.stats, now)


def _stream_metrics(stats: FollowingStats | None, now: float) -> Iterator[Metric]:
    """Yields the metrics of the step stream. Ages have no sample until there is a time to measure them from."""
    calls = CounterMetricFamily(
        "meshserve_followed_calls_total",
        "Calls received from process 0, by method; the method run is a step.",
        labels=("method",),
    )
    num_calls = dict.fromkeys(REPLAYED_METHODS, 0) | (dict(stats.num_calls) if stats is not None else {})
    for method, count in num_calls.items():
        calls.add_metric((method,), count)
    yield calls
    yield CounterMetricFamily(
        "meshserve_followed_done_total",
        "Calls that were replayed and acknowledged.",
        value=stats.num_acknowledged if stats is not None else 0,
    )
    if stats is None:
        return
    yield GaugeMetricFamily(
        "meshserve_leader_silence_seconds",
        "Time since the last message from process 0, in seconds.",
        value=max(0.0, now - stats.heard),
    )
    if stats.acknowledged is not None:
        yield GaugeMetricFamily(
            "meshserve_last_followed_age_seconds",
            "Time since the last call was completed, in seconds.",
            value=max(0.0, now - stats.acknowledged),
        )
