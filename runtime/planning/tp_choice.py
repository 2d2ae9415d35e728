"""Selects the best TP size for a machine, whose remaining devices serve replicas.

The best TP size is the one at which the whole machine decodes the most tokens per second, with as many requests of the
given length as fit. Among TP sizes within `_EQUAL` of that throughput, it is the one with the shortest step. The times
are those of the roofline plus the estimated all-reduces. A mixture of experts is planned with both splits of its
experts, by tensor and by expert.
"""

import dataclasses

from .memory_plan import Planner
from .roofline import Roofline

_EQUAL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPSizePlan:
    """The plan of a machine at one TP size."""

    tp: int
    num_replicas: int
    num_requests: int  # requests of the given length that run at the same time in one replica; 0 if it does not fit
    step_seconds: float = 0.0  # decode step of a single request
    tokens_per_second: float = 0.0  # of all replicas together, with all requests
    reason: str = ""  # why the model does not fit
    expert_parallel: bool = False  # as in `ServeConfig`

    @property
    def name(self) -> str:
        """The TP size, and how experts are split if not by tensor."""
        return f"{self.tp} by expert" if self.expert_parallel else str(self.tp)

    @property
    def flags(self) -> str:
        """The options to serve it with."""
        return f"--tp {self.tp}" + (" --expert-parallel" if self.expert_parallel else "")


def tp_size_plans(planner: Planner, length: int) -> list[TPSizePlan]:
    """Returns the plans of all TP sizes and splits of experts that the model and the machine allow."""
    num_devices, model = planner.target.num_devices, planner.server.model
    tp_sizes = [tp for tp in range(1, num_devices + 1) if num_devices % tp == 0 and model.num_query_heads % tp == 0]
    by_tensor, by_expert = (
        dataclasses.replace(planner.server.requested, expert_parallel=is_set) for is_set in (False, True)
    )
    return [
        _tp_size_plan(planner.replan(config=config, num_devices=tp), length)
        for tp in tp_sizes
        for config in ([by_tensor, by_expert] if model.experts is not None and tp > 1 else [by_tensor])
    ]


def _tp_size_plan(planner: Planner, length: int) -> TPSizePlan:
    num_replicas = planner.target.num_devices // planner.server.tp
    plan = TPSizePlan(
        tp=planner.server.tp,
        num_replicas=num_replicas,
        num_requests=0,
        expert_parallel=planner.server.requested.expert_parallel,
    )
    try:
        num_requests = planner.plan().num_requests(length)
    except MemoryError as error:
        return dataclasses.replace(plan, reason=str(error))
    if not num_requests:
        return dataclasses.replace(plan, reason=f"the cache is too small for a request of {length} tokens")
    roofline = roofline_of(planner)
    if roofline is None:
        return dataclasses.replace(plan, num_requests=num_requests)
    full = roofline.decode(num_requests, length)
    return dataclasses.replace(
        plan,
        num_requests=num_requests,
        step_seconds=roofline.decode(1, length).total_seconds,
        tokens_per_second=num_replicas * num_requests / full.total_seconds,
    )


def roofline_of(planner: Planner) -> Roofline | None:
    """Returns the roofline of a planned server, or None if the speed of its devices is unknown."""
    chip = planner.target.chip
    if not chip.flops_per_second:
        return None
    return Roofline(
        model=planner.server.model,
        layout=planner.server.layout,
        dtype=planner.server.dtype,
        cache_dtype=planner.server.cache_dtype,
        chip=chip,
        has_p2p=planner.server.kernel_names.has_p2p,
    )


def best_tp_size(plans: list[TPSizePlan], length: int) -> tuple[TPSizePlan | None, str]:
    """Returns the best plan and the reason for it; None if the model fits at no TP size."""
    fitting = [plan for plan in plans if plan.num_requests]
    if not fitting:
        return None, plans[-1].reason if plans else "no TP size divides the query heads"
    most = max(plan.tokens_per_second for plan in fitting)
    if not most:
        return fitting[0], "the smallest that fits; the speed of this device is unknown"
    best = min(
        (plan for plan in fitting if plan.tokens_per_second >= (1 - _EQUAL) * most), key=lambda plan: plan.step_seconds
    )
    reason = (
        f"{best.num_replicas} x tp {best.name} decode {best.tokens_per_second:,.0f} tokens/s with "
        f"{best.num_replicas * best.num_requests} requests of {length} tokens"
    )
    others = [plan for plan in fitting if plan is not best]
    if others:
        second = max(others, key=lambda plan: plan.tokens_per_second)
        reason += f", tp {second.name} {second.tokens_per_second:,.0f}"
    fastest = min(fitting, key=lambda plan: plan.step_seconds)
    if fastest is not best:
        reason += (
            f". For a single request, tp {fastest.name} is fastest: {1e3 * fastest.step_seconds:.2f} ms per token "
            f"instead of {1e3 * best.step_seconds:.2f}"
        )
    too_small = [plan.name for plan in plans if not plan.num_requests]
    return best, reason + (f". The model does not fit at tp {', '.join(too_small)}" if too_small else "") + "."
