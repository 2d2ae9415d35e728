"""Simulates a day of a fleet under a HorizontalPodAutoscaler, with the numbers of a manifest.

The fleet is a fluid: requests arrive, wait where every slot is taken, and run for a fixed time. A new replica serves
minutes after it was asked for. The autoscaler follows its documented algorithm: desired = ceil(ready * value / target)
for each metric, nothing within 10 % of a target, the largest of the metrics, then the windows and policies.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

STEP_SECONDS = 15  # period of the autoscaler's control loop
DAY_SECONDS = 86_400
SLOTS, RUN_SECONDS = 64, 20.0  # a replica's requests at a time, and time of each
START_SECONDS = 180  # from the decision to the first request
PROMISED_SECONDS = 5.0  # waiting time within which a request counts as served well
_TOLERANCE = 0.1


def arrivals_per_second(seconds: float, noise: random.Random) -> float:
    """Returns the demand: a night, a morning, a noon peak and an evening, five minutes of rush, and noise."""
    hour = seconds / 3600
    day = max(0.0, math.sin((hour - 6) / 17 * math.pi)) if 6 <= hour <= 23 else 0.0
    noon = math.exp(-(((hour - 12.5) / 1.2) ** 2))
    rush = 5.0 if 0 <= seconds - 16 * 3600 < 300 else 0.0
    return (1.0 + 9.0 * day + 6.0 * noon + rush) * noise.lognormvariate(0.0, 0.25)


@dataclass(frozen=True)
class Rule:
    """The autoscaler of a manifest."""

    least: int
    most: int
    targets: dict[str, float]
    up: dict[str, Any]
    down: dict[str, Any]

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> "Rule":
        spec = manifest["spec"]
        targets = {each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"] for each in spec["metrics"]}
        behavior = spec["behavior"]
        return cls(
            least=spec["minReplicas"],
            most=spec["maxReplicas"],
            targets={name: quantity(str(value)) for name, value in targets.items()},
            up=behavior["scaleUp"],
            down=behavior["scaleDown"],
        )


def quantity(text: str) -> float:
    """Returns the number of a Kubernetes quantity."""
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


@dataclass
class Day:
    """The fleet and what became of it."""

    rule: Rule
    num_replicas: int = 2
    waiting: float = 0.0
    running: float = 0.0
    ready_at: deque[float] = field(default_factory=deque)  # when starting replicas are ready
    recommended: deque[tuple[float, int]] = field(default_factory=deque)
    changes: list[tuple[float, int]] = field(default_factory=list)
    num_requests: float = 0.0
    num_served_well: float = 0.0
    replica_seconds: float = 0.0
    most_replicas: int = 0

    def run(self, seed: int = 1) -> "Day":
        noise = random.Random(seed)
        for step in range(DAY_SECONDS // STEP_SECONDS):
            now = float(step * STEP_SECONDS)
            self._serve(now, arrivals_per_second(now, noise))
            self._scale(now)
        return self

    @property
    def num_ready(self) -> int:
        return self.num_replicas - len(self.ready_at)

    def _serve(self, now: float, rate: float) -> None:
        while self.ready_at and self.ready_at[0] <= now:
            self.ready_at.popleft()
        slots = self.num_ready * SLOTS
        self.running -= self.running * min(1.0, STEP_SECONDS / RUN_SECONDS)
        arrived = rate * STEP_SECONDS
        self.waiting += arrived
        started = min(self.waiting, max(0.0, slots - self.running))
        self.waiting -= started
        self.running += started
        wait_seconds = self.waiting / max(slots / RUN_SECONDS, 1e-9)
        self.num_requests += arrived
        self.num_served_well += arrived * (wait_seconds <= PROMISED_SECONDS)
        self.replica_seconds += self.num_replicas * STEP_SECONDS
        self.most_replicas = max(self.most_replicas, self.num_replicas)

    def _wanted(self) -> int:
        """Returns what the metrics ask for."""
        values = {
            "meshserve_waiting_requests": self.waiting / self.num_ready,
            "kv_cache_usage": self.running / (self.num_ready * SLOTS),
        }
        found = []
        for name, target in self.rule.targets.items():
            ratio = values[name] / target
            found.append(self.num_replicas if abs(ratio - 1) <= _TOLERANCE else math.ceil(self.num_ready * ratio))
        return min(max(*found, self.rule.least), self.rule.most)

    def _scale(self, now: float) -> None:
        self.recommended.append((now, self._wanted()))
        windows = [self.rule.up["stabilizationWindowSeconds"], self.rule.down["stabilizationWindowSeconds"]]
        while self.recommended[0][0] < now - max(windows):
            self.recommended.popleft()
        up = min(number for moment, number in self.recommended if moment >= now - windows[0])
        down = max(number for moment, number in self.recommended if moment >= now - windows[1])
        if up > self.num_replicas:
            self._change(now, min(up - self.num_replicas, self._allowed(now, self.rule.up, 1)))
        elif down < self.num_replicas:
            self._change(now, -min(self.num_replicas - down, self._allowed(now, self.rule.down, -1)))

    def _allowed(self, now: float, behavior: dict[str, Any], sign: int) -> int:
        """Returns how many replicas the policies let it add or remove now."""
        [policy] = behavior["policies"]
        recent = sum(number for moment, number in self.changes if moment > now - policy["periodSeconds"])
        return max(0, policy["value"] - max(0, sign * recent))

    def _change(self, now: float, number: int) -> None:
        if not number:
            return
        self.num_replicas += number
        self.changes.append((now, number))
        for _ in range(number):
            self.ready_at.append(now + START_SECONDS)
        for _ in range(-number):
            if self.ready_at:
                self.ready_at.pop()

    @property
    def goodput(self) -> float:
        """The share of requests that were served well."""
        return self.num_served_well / self.num_requests

    @property
    def num_reversals(self) -> int:
        """How often it added replicas that it had removed within the hour before, or the reverse."""
        pairs = zip(self.changes, self.changes[1:], strict=False)
        return sum(first[1] * second[1] < 0 and second[0] - first[0] < 3600 for first, second in pairs)
