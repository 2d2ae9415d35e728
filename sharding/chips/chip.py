"""Describes one kind of accelerator to the planner, the compiler and the mesh."""

import dataclasses
from collections.abc import Mapping

GIB = 1 << 30
_HOPPER = (9, 0)
_LEAST_NVLINK = 200e9  # bytes per second; PCIe 6.0 has 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of accelerator, described per jax device. Speeds are data-sheet values, or 0 if there is none."""

    name: str  # in the names of targets
    kind: str  # jax's device_kind; a GPU of this kind may have another name
    platform: str = "tpu"  # jax's name
    devices_per_chip: int = 1
    hbm_bytes: int  # on a TPU, what the compiler lets a program use; on a GPU, the total
    jax_fraction: float = 1.0  # share of hbm_bytes that jax allocates by default
    hbm_bytes_per_second: float
    flops_per_second: float = 0.0  # bfloat16, dense
    fp8_flops_per_second: float = 0.0  # e4m3, dense
    vector_flops_per_second: float = 0.0  # float32, outside of the matrix units
    link_bytes_per_second: float = 0.0  # in each direction, all links of the device together
    compute_capability: tuple[int, int] | None = None  # for NVIDIA GPUs
    num_multiprocessors: int = 0  # in a GPU; 0 if unknown
    is_estimated: bool = False  # whether the speeds were derived from the device's attributes instead of a data sheet
    is_unrolled: bool  # whether layers are unrolled; see docs/decisions
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sum_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # added on meshes of several devices

    @property
    def has_nvlink(self) -> bool:
        """Whether NVLink connects a GPU with every other of its host."""
        return self.platform == "gpu" and self.link_bytes_per_second >= _LEAST_NVLINK

    @property
    def is_hopper(self) -> bool:
        return self.compute_capability == _HOPPER
