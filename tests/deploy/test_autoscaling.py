"""The autoscaler of the manifests over a simulated day: enough replicas in time, few reversals, fewer replica hours."""

import dataclasses

import pytest
import yaml

from .autoscaled_day import DAY_SECONDS, Day, Rule
from .manifests import DEPLOY

RULE = Rule.of(yaml.safe_load((DEPLOY / "kubernetes" / "components" / "autoscale" / "autoscaler.yaml").read_text()))


def report(name: str, day: Day) -> None:
    hours = day.replica_seconds / 3600
    print(
        f"\n{name}: goodput {day.goodput:.2%}, {hours:.0f} replica hours, at most {day.most_replicas} replicas, "
        f"{len(day.changes)} changes, {day.num_reversals} reversals"
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_day_is_served_with_fewer_replicas_and_few_reversals(seed: int):
    day = Day(RULE).run(seed)
    report(f"manifest, day {seed}", day)
    assert day.goodput > 0.98
    assert day.replica_seconds < 0.75 * day.most_replicas * DAY_SECONDS
    assert day.num_reversals <= 4


def test_without_windows_replicas_come_and_go():
    """The same targets without hysteresis: what the windows and policies of the manifest are for."""
    at_once = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 8, "periodSeconds": 15}]}
    steady, nervous = Day(RULE).run(), Day(dataclasses.replace(RULE, up=at_once, down=at_once)).run()
    report("manifest", steady)
    report("without windows", nervous)
    assert nervous.num_reversals > 10 * max(steady.num_reversals, 1)
    assert nervous.goodput < steady.goodput


def test_the_queue_alone_reacts_too_late():
    """Scaled by waiting requests only, replicas leave while the rest are nearly full, and come when requests wait."""
    targets = {name: target for name, target in RULE.targets.items() if name == "meshserve_waiting_requests"}
    both, queue = Day(RULE).run(), Day(dataclasses.replace(RULE, targets=targets)).run()
    report("queue and cache", both)
    report("queue alone", queue)
    assert queue.goodput < both.goodput
