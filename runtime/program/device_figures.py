"""What a server holds on each device, in the same words whether planned (`capacity`) or measured at its start.

The start's log has them in a line of JSON after `FIGURES_IN_LOG`; `benchmarks/checks/plan_check.py` compares the two.
"""

import dataclasses

FIGURES_IN_LOG = "each device holds: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Bytes of one device."""

    limit_bytes: int  # that jax lets a program take; 0 where that is not known
    weight_bytes: int
    scratch_bytes: int  # of the largest program, beside its arguments
    processor_bytes: int  # what penalties and bias are kept in
    page_bytes: int
    num_pages: int
    num_programs: int  # shapes of steps

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes
