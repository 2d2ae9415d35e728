"""What changes on the devices before a step: adapters in slots, and which of them requests have."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..api.adapters import AdapterInfo
from ..scheduler.adapter_slots import AdapterSlots
from ..scheduler.step_plan import StepPlan

NO_SLOT = -1  # in place of the slot of an adapter


class AdapterChanges(NamedTuple):
    """Changes that are dispatched before a step, in this order."""

    loads: Sequence[tuple[int, AdapterInfo]]  # slots, and what is copied there from host memory
    request_slots: Mapping[int, int]  # slots of requests, and those of their adapters; NO_SLOT without one

    @classmethod
    def of(cls, slots: AdapterSlots, plan: StepPlan | None) -> "AdapterChanges | None":
        """Returns what a plan changes, if anything. Called before the scheduler's next call."""
        loads = slots.take_loads()
        admitted = [each.request for each in plan.admitted] if plan is not None else []
        request_slots = {
            request.slot: NO_SLOT if request.adapter_slot is None else request.adapter_slot
            for request in admitted
            if request.slot is not None
        }
        return cls(loads, request_slots) if loads or request_slots else None
