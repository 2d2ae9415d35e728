"""The device memory of a server, planned by `memory_plan` or measured at startup, in one type.

A server logs its figures at startup as a line of JSON after `FIGURES_IN_LOG`; `benchmarks/checks/plan_check.py`
compares them with the plan.
"""

import dataclasses

FIGURES_IN_LOG = "each device holds: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """The memory use of one device, in bytes."""

    limit_bytes: int  # maximum that jax lets a program use; 0 if unknown
    weight_bytes: int
    scratch_bytes: int  # the largest program's, in addition to its arguments, and output buffers
    processor_bytes: int  # state of the logits processors
    page_bytes: int
    num_pages: int
    num_programs: int  # compiled steps

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes
