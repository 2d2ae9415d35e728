"""Readings of a server's metrics, and what has happened between two of them."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field

from prometheus_client.parser import text_string_to_metric_families

from ...api.request import Load

_REQUESTS = "meshserve_requests_total"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a server said at one time.

    Attributes:
      seconds: The time, by a monotonic clock.
      state: The state of the server, such as "READY", or why it does not answer.
      load: None if the server does not answer, or has no engine yet.
      values: Counters and gauges of /metrics by name, added up over their labels. Empty without metrics.
      outcomes: Ended requests by outcome.
      buckets: The number of observations up to each bound, by histogram.
    """

    seconds: float
    state: str = ""
    load: Load | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    outcomes: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)


def with_metrics(reading: Reading, text: str) -> Reading:
    """Returns the reading with the metrics of a /metrics page in Prometheus' text format."""
    values: defaultdict[str, float] = defaultdict(float)
    outcomes: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                buckets[family.name][float(sample.labels["le"])] = sample.value
            else:
                values[sample.name] += sample.value
            if sample.name == _REQUESTS:
                outcomes[sample.labels["outcome"]] += sample.value
    return dataclasses.replace(reading, values=dict(values), outcomes=dict(outcomes), buckets=dict(buckets))


@dataclasses.dataclass(frozen=True)
class Interval:
    """What has happened between two readings. Every figure is None if it is unknown."""

    before: Reading
    after: Reading

    def increase(self, name: str) -> float | None:
        """The increase of a counter. None if the server was restarted between the readings."""
        before, after = self.before.values.get(name), self.after.values.get(name)
        return None if before is None or after is None or after < before else after - before

    def rate(self, name: str) -> float | None:
        """The increase of a counter per second."""
        seconds, increase = self.after.seconds - self.before.seconds, self.increase(name)
        return None if increase is None or seconds <= 0 else increase / seconds

    def share(self, name: str, whole: str) -> float | None:
        """The increase of a counter as a share of that of another."""
        part, total = self.increase(name), self.increase(whole)
        return part / total if part is not None and total else None

    def mean(self, name: str) -> float | None:
        """The mean of a histogram's new observations."""
        return self.share(f"{name}_sum", f"{name}_count")

    def quantile(self, name: str, fraction: float) -> float | None:
        """Estimates a quantile of a histogram's new observations as Prometheus does, linearly within a bucket."""
        before, after = self.before.buckets.get(name, {}), self.after.buckets.get(name, {})
        counts = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(after.items())]
        total = counts[-1][1] if counts else 0.0
        if total <= 0 or any(count < 0 for _, count in counts):
            return None
        wanted, low, below = fraction * total, 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (wanted - below) / (count - below) if count > below else bound
            low, below = bound, count
        return low
