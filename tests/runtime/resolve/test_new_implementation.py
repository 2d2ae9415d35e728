"""Adds an attention for GPUs from 8.0 on, as CONTRIBUTING says, and finds it in what follows from kernels."""

import pytest

from meshserve.kernels import paged_attention
from meshserve.kernels.implementation import Device, in_order
from meshserve.kernels.paged_attention import AttentionImplementation, reference
from meshserve.kernels.paged_attention.contract import least_cost
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.plan.tp_choice import roofline_of
from meshserve.runtime.resolve.resolved_server import ResolvedServer, resolve_for
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS, target

MODEL, CONFIG = named_model("qwen3-8b"), ServeConfig(model="qwen3-8b")


def too_old(device: Device) -> str | None:
    is_new = device.compute_capability is not None and device.compute_capability >= (8, 0)
    return None if is_new else "it needs compute capability 8.0"


PORTABLE = AttentionImplementation(
    name="portable",
    unsupported_device=too_old,
    automatic_on=("gpu",),
    measured_on=("h200", "a100"),
    reached=0.4,
    attend=reference.paged_attention,
    attend_part=reference.partial_attention,
    write=reference.write_kv,
    cost=least_cost,
)


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[AttentionImplementation]:
    """The implementations without ours of the same name."""
    others = [each for each in paged_attention.IMPLEMENTATIONS.values() if each.name != PORTABLE.name]
    monkeypatch.setattr(paged_attention, "IMPLEMENTATIONS", in_order(*others))
    return others


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch, others: list[AttentionImplementation]) -> None:
    monkeypatch.setattr(paged_attention, "IMPLEMENTATIONS", in_order(others[0], PORTABLE, *others[1:]))


def resolved(card: str) -> ResolvedServer:
    return resolve_for(CONFIG, MODEL, chip=CHIPS[card], num_devices=1)


@pytest.mark.usefixtures("portable")
def test_it_serves_where_the_list_says_so() -> None:
    names = {card: resolved(card).kernel_names.attention for card in ("h200", "a100", "rtx4090", "b200", "v6e", "cpu")}
    assert names == dict(h200="cuda", a100="portable", rtx4090="portable", b200="portable", v6e="tpu", cpu="reference")


def test_limits_plan_and_marks_follow_from_its_description(request: pytest.FixtureRequest) -> None:
    def planned(card: str) -> Planner:
        return Planner.on(target(f"{card}:1"), CONFIG, MODEL, num_devices=1)

    before = planned("a100")
    request.getfixturevalue("portable")
    after, unmeasured = planned("a100"), planned("rtx4090")
    assert after.server.step_limits.max_prefill_tokens > 2 * before.server.step_limits.max_prefill_tokens
    assert after.server.step_limits.max_step_tokens == 8192, "no page is gathered"
    slow, fast, other = (roofline_of(each) for each in (before, after, unmeasured))
    assert slow is not None and fast is not None and other is not None
    assert fast.decode(1, 1024).bound == "memory" and slow.decode(1, 1024).bound == "launches"
    assert fast.decode(1, 1024).seconds == pytest.approx(15.3e9 / 2039e9, rel=0.02)
    assert not other.is_measured
