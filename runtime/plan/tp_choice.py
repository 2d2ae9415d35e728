"""Selects the TP size: the best one for a machine whose remaining devices serve replicas, and that of one server.

The best TP size of a machine is the one at which it decodes the most tokens per second, with as many requests of the
given length as fit. Among TP sizes within `_EQUAL` of that throughput, it is the one with the shortest step. The times
are those of the roofline plus the estimated all-reduces; of embedding models and rerankers, those of full steps of
prompts, and of one prompt. A mixture of experts is planned with both splits of its experts, by tensor and by expert. A
server whose `tp` is auto gets the size that is the fastest for a single request.
"""

import dataclasses
import logging
from collections.abc import Sequence

import jax

from meshserve.sharding.chips import Chip, Target, chip_of

from ..api.errors import ConfigError
from ..api.tasks import GENERATE
from ..model_files.model_config import ModelConfig
from ..options.serve_config import ServeConfig
from ..resolve.resolved_server import ResolvedServer
from .memory_plan import Planner, draft_memory
from .roofline import Roofline

_log = logging.getLogger(__name__)

_EQUAL = 0.05
_REQUEST_TOKENS = 1024  # length of the requests for which the TP size of a server is chosen


def allowed_tp_sizes(model: ModelConfig, num_devices: int) -> list[int]:
    """Returns the TP sizes over which a model can be split on `num_devices` devices."""
    return [tp for tp in range(1, num_devices + 1) if model.num_query_heads % tp == 0]


def check_tp(tp: int, model: ModelConfig, num_devices: int, devices: str, hint: str = "") -> None:
    """Checks a TP size against the model and the devices.

    Args:
      tp: The TP size.
      model: The model.
      num_devices: How many devices there are.
      devices: What they are, for the error.
      hint: What else to do about too few devices.

    Raises:
      ConfigError: It is not possible. The message lists the possible sizes.
    """
    allowed = allowed_tp_sizes(model, num_devices)
    if tp in allowed:
        return
    reason = f"the model's {model.num_query_heads} query heads cannot be divided by it"
    if tp > num_devices:
        reason = f"there {'is' if num_devices == 1 else 'are'} {num_devices} {devices}"
    sizes = ", ".join(map(str, allowed))
    raise ConfigError(f"tp is {tp}, but {reason}. Possible: {sizes}.{hint if tp > num_devices else ''}")


def choose_tp(config: ServeConfig, model: ModelConfig, devices: Sequence[jax.Device]) -> int:
    """Returns the TP size of a server, which is chosen if the option is auto.

    Args:
      config: The options.
      model: The model.
      devices: All devices, of every process.

    Raises:
      ConfigError: The option's size is not possible.
    """
    num_processes = len({device.process_index for device in devices})
    allowed = [tp for tp in allowed_tp_sizes(model, len(devices)) if tp % num_processes == 0]
    if config.tp or not allowed:
        tp = config.tp or num_processes
        hint = f" To try it without such devices, add --cpu-devices {tp}."
        check_tp(tp, model, len(devices), f"{devices[0].device_kind} device(s)", hint)
        return tp
    if num_processes > 1 or len(allowed) == 1:
        return allowed[-1]
    if devices[0].platform == "cpu":
        return 1  # virtual devices share the cores of the machine, so that more of them are no faster
    chip = chip_of(devices[0])
    return allowed[-1] if chip is None or not chip.flops_per_second else _fastest(config, model, chip, allowed)


def _fastest(config: ServeConfig, model: ModelConfig, chip: Chip, allowed: Sequence[int]) -> int:
    """Returns the TP size with the shortest decode step of a single request; the largest if the model fits at none.

    Among sizes that take about as long, it is the smallest. Where this leaves devices over, replicas use them better.
    """
    plans = []
    for tp in allowed:
        try:
            planner = Planner.on(_target(chip, tp), config, model, num_devices=tp)
        except ValueError:  # the experts cannot be split over this number of devices
            continue
        plans.append(_tp_size_plan(planner, _REQUEST_TOKENS))
    fitting = [plan for plan in plans if plan.num_requests]
    if not fitting:
        return allowed[-1]
    shortest = min(plan.step_seconds for plan in fitting)
    best = next(plan for plan in fitting if plan.step_seconds <= (1 + _EQUAL) * shortest)
    times = ", ".join(f"{1e3 * plan.step_seconds:.2f} ms at tp {plan.tp}" for plan in fitting)
    _log.info("tp auto: a token of a single request should take %s", times)
    return best.tp


def _target(chip: Chip, num_devices: int) -> Target:
    return Target(name=f"{num_devices} x {chip.name}", chip=chip, num_devices=num_devices)


def planner_of(server: ResolvedServer, chip: Chip) -> Planner:
    """Returns the planner of a server that has been resolved for devices of this kind."""
    target = _target(chip, server.tp)
    return Planner(name=server.requested.model, target=target, server=server, draft=draft_memory(server))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPSizePlan:
    """The plan of a machine at one TP size."""

    tp: int
    num_replicas: int
    num_requests: int  # requests of the given length that run at the same time in one replica; 0 if it does not fit
    step_seconds: float = 0.0  # decode step of a single request, or a single prompt of an embedding model or reranker
    tokens_per_second: float = 0.0  # all replicas together, with all requests
    reason: str = ""  # why the model does not fit
    expert_parallel: bool = False  # as in `ServeConfig`
    limited_by: str = ""  # what allows no more requests: "max_running" or "KV cache"
    task: str = GENERATE  # the model's task

    @property
    def name(self) -> str:
        """The TP size, and how experts are split if not by tensor."""
        return f"{self.tp} by expert" if self.expert_parallel else str(self.tp)

    @property
    def flags(self) -> str:
        """The options to serve it with."""
        return f"--tp {self.tp}" + (" --expert-parallel" if self.expert_parallel else "")


def tp_size_plans(planner: Planner, length: int) -> list[TPSizePlan]:
    """Returns the plans of all TP sizes and splits of experts that the model and the machine allow.

    If the planned server divides pages (cp), so do the others where they can, among as many devices as they can.
    """
    num_devices, model = planner.target.num_devices, planner.server.model
    cp = 1 if planner.server.requested.cp == 1 else 0
    tp_sizes = [tp for tp in allowed_tp_sizes(model, num_devices) if num_devices % tp == 0]
    by_tensor, by_expert = (
        dataclasses.replace(planner.server.requested, expert_parallel=is_set, cp=cp) for is_set in (False, True)
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
        memory = planner.plan()
    except MemoryError as error:
        return dataclasses.replace(plan, reason=str(error))
    num_requests = memory.num_requests(length)
    plan = dataclasses.replace(plan, limited_by="max_running" if num_requests == memory.max_running else "KV cache")
    if not num_requests:
        return dataclasses.replace(plan, reason=f"the cache is too small for a request of {length} tokens")
    roofline = roofline_of(planner)
    if roofline is None:
        return dataclasses.replace(plan, num_requests=num_requests)
    if planner.server.model.pooling is not None:
        full = roofline.pooling(length, planner.server.limits.max_step_tokens)
        alone = roofline.prefill(length, planner.server.limits.max_step_tokens)
    else:
        full, alone = roofline.decode(num_requests, length), roofline.decode(1, length)
    return dataclasses.replace(
        plan,
        num_requests=num_requests,
        step_seconds=alone.total_seconds,
        tokens_per_second=num_replicas * full.num_tokens / full.total_seconds,
        task=planner.server.model.task,
    )


def roofline_of(planner: Planner) -> Roofline | None:
    """Returns the roofline of a planned server, or None if the speed of its devices is unknown."""
    chip = planner.target.chip
    if not chip.flops_per_second:
        return None
    server = planner.server
    return Roofline(
        shapes=server.kernel_shapes, chip=chip, names=server.kernel_names, has_p2p=server.kernel_names.has_p2p
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
    verb, unit = ("decode", "token") if best.task == GENERATE else (best.task, "text")
    num_requests = best.num_replicas * best.num_requests
    load = f"{num_requests} requests of {length} tokens, limited by {best.limited_by}"
    load = load if best.task == GENERATE else f"texts of {length} tokens"
    reason = f"{best.num_replicas} x tp {best.name} {verb} {best.tokens_per_second:,.0f} tokens/s with {load}"
    others = [plan for plan in fitting if plan is not best]
    if others:
        second = max(others, key=lambda plan: plan.tokens_per_second)
        reason += f"; tp {second.name} {second.tokens_per_second:,.0f}"
    fastest = min(fitting, key=lambda plan: plan.step_seconds)
    if fastest is not best:
        reason += (
            f". For a single request, tp {fastest.name} is fastest: {1e3 * fastest.step_seconds:.2f} ms per {unit} "
            f"instead of {1e3 * best.step_seconds:.2f}"
        )
    too_small = [plan.name for plan in plans if not plan.num_requests]
    return best, reason + (f". The model does not fit at tp {', '.join(too_small)}" if too_small else "") + "."
