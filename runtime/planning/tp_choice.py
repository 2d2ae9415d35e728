"""Which tensor-parallel degree suits a machine: the devices that a degree leaves over serve replicas.

The best degree is the one at which the whole machine decodes the most tokens a second, with every request of the given
length that fits; of degrees within `_EQUAL` of it, the one with the shortest step. Times are the roofline and the
estimated all-reduces.
"""

import dataclasses

from .kernel_selection import named_kernels
from .memory_plan import Planner
from .roofline import Roofline

_EQUAL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPSizePlan:
    """A machine at one degree."""

    tp: int
    num_replicas: int
    num_requests: int  # of the given length that run at a time, in one replica; 0: the model does not fit
    step_seconds: float = 0.0  # of one request alone
    tokens_per_second: float = 0.0  # of all replicas, full
    reason: str = ""  # why it does not fit


def tp_size_plans(planner: Planner, length: int) -> list[TPSizePlan]:
    """Every degree that the model allows and the machine has devices for."""
    num_devices = planner.target.num_devices
    tp_sizes = [tp for tp in range(1, num_devices + 1) if num_devices % tp == 0]
    return [_tp_size_plan(_at(planner, tp), length) for tp in tp_sizes if planner.model.num_query_heads % tp == 0]


def _at(planner: Planner, tp: int) -> Planner:
    """At another degree the devices may add up in another way."""
    asked = dataclasses.replace(planner.config, all_reduce=planner.asked_all_reduce)
    config = named_kernels(asked, planner.model, platform=planner.target.chip.platform, num_devices=tp)
    return dataclasses.replace(planner, num_devices=tp, config=config)


def _tp_size_plan(planner: Planner, length: int) -> TPSizePlan:
    tp, num_replicas = planner.num_devices, planner.target.num_devices // planner.num_devices
    try:
        num_requests = planner.plan().num_requests(length)
    except MemoryError as error:
        return TPSizePlan(tp=tp, num_replicas=num_replicas, num_requests=0, reason=str(error))
    if not num_requests:
        reason = f"its cache is too small for a request of {length} tokens"
        return TPSizePlan(tp=tp, num_replicas=num_replicas, num_requests=0, reason=reason)
    roofline = roofline_of(planner)
    if roofline is None:
        return TPSizePlan(tp=tp, num_replicas=num_replicas, num_requests=num_requests)
    full = roofline.decode(num_requests, length)
    return TPSizePlan(
        tp=tp,
        num_replicas=num_replicas,
        num_requests=num_requests,
        step_seconds=roofline.decode(1, length).whole_seconds,
        tokens_per_second=num_replicas * num_requests / full.whole_seconds,
    )


def roofline_of(planner: Planner) -> Roofline | None:
    """None where the device has no data sheet."""
    chip = planner.target.chip
    if not chip.flops_per_second:
        return None
    return Roofline(
        model=planner.model,
        layout=planner.layout,
        dtype=planner.dtype,
        chip=chip,
        has_p2p=planner.config.all_reduce == "p2p",
    )


def best_tp_size(plans: list[TPSizePlan], length: int) -> tuple[TPSizePlan | None, str]:
    """The best, and the reason; None if the model fits at no degree."""
    fitting = [plan for plan in plans if plan.num_requests]
    if not fitting:
        return None, plans[-1].reason if plans else "no degree divides the query heads"
    most = max(plan.tokens_per_second for plan in fitting)
    if not most:
        return fitting[0], "the smallest that fits; of this device no speeds are known"
    best = min(
        (plan for plan in fitting if plan.tokens_per_second >= (1 - _EQUAL) * most), key=lambda plan: plan.step_seconds
    )
    reason = (
        f"{best.num_replicas} x tp {best.tp} decode {best.tokens_per_second:,.0f} tokens/s with "
        f"{best.num_replicas * best.num_requests} requests of {length} tokens"
    )
    others = [plan for plan in fitting if plan is not best]
    if others:
        second = max(others, key=lambda plan: plan.tokens_per_second)
        reason += f", tp {second.tp} {second.tokens_per_second:,.0f}"
    fastest = min(fitting, key=lambda plan: plan.step_seconds)
    if fastest is not best:
        reason += (
            f". For one request alone tp {fastest.tp} is fastest: {1e3 * fastest.step_seconds:.2f} ms a token against "
            f"{1e3 * best.step_seconds:.2f}"
        )
    too_small = [str(plan.tp) for plan in plans if not plan.num_requests]
    return best, reason + (f". It does not fit at tp {', '.join(too_small)}" if too_small else "") + "."
