"""Describes each supported chip to the planner, compiler and mesh, and names target machines for offline planning."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from .mesh import make_mesh
from .topology import NoCompilerError as NoCompilerError
from .topology import gpu_topology

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of accelerator, described per jax device. Speeds are data-sheet values, or 0 if there is none."""

    kind: str  # jax's device_kind
    platform: str = "tpu"  # jax's name
    devices_per_chip: int = 1
    hbm_bytes: int  # on a TPU, what the compiler lets a program use; on a GPU, the total
    jax_fraction: float = 1.0  # of hbm_bytes that jax allocates by default
    hbm_bytes_per_second: float
    flops_per_second: float = 0.0  # bfloat16, dense
    link_bytes_per_second: float = 0.0  # in each direction, all links of the device together
    is_unrolled: bool  # whether layers are unrolled; see docs/decisions
    is_hopper: bool = False  # whether it runs our CUDA kernels
    compiler_options: Mapping[str, str]
    sum_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # added on meshes of several devices

    @property
    def name(self) -> str:
        return next((name for name, chip in CHIPS.items() if chip is self), self.kind)


CHIPS = {
    "v5e": Chip(
        kind="TPU v5 lite",
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_second=819e9,
        flops_per_second=197e12,
        link_bytes_per_second=100e9,
        is_unrolled=False,
        compiler_options={},
        sum_options={
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
            "xla_enable_async_all_reduce": "true",
        },
    ),
    "v6e": Chip(
        kind="TPU v6 lite",
        hbm_bytes=int(31.24 * GIB),
        hbm_bytes_per_second=1640e9,
        flops_per_second=918e12,
        link_bytes_per_second=224e9,
        is_unrolled=False,
        compiler_options={},
        sum_options={"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"},
    ),
    "v5p": Chip(
        kind="TPU v5",
        hbm_bytes=int(95.73 * GIB),
        hbm_bytes_per_second=2765e9,
        flops_per_second=459e12,
        link_bytes_per_second=300e9,
        is_unrolled=False,
        compiler_options={},
    ),
    "tpu7x": Chip(
        kind="TPU7x",
        devices_per_chip=2,
        hbm_bytes=int(94.75 * GIB),
        hbm_bytes_per_second=3690e9,
        flops_per_second=1153e12,
        link_bytes_per_second=300e9,
        is_unrolled=False,
        # Without this, XLA copies all stacked weights into tiles of 16 rows in every step.
        compiler_options={"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
    ),
    "h100": Chip(
        kind="NVIDIA H100 80GB HBM3",
        platform="gpu",
        hbm_bytes=int(79.2 * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=3350e9,
        flops_per_second=989e12,
        link_bytes_per_second=450e9,
        is_unrolled=True,
        is_hopper=True,
        compiler_options={},
    ),
    "h200": Chip(
        kind="NVIDIA H200",
        platform="gpu",
        hbm_bytes=int(139.8 * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=4800e9,
        flops_per_second=989e12,
        link_bytes_per_second=450e9,
        is_unrolled=True,
        is_hopper=True,
        compiler_options={},
    ),
    "a100": Chip(
        kind="NVIDIA A100-SXM4-80GB",
        platform="gpu",
        hbm_bytes=int(79.1 * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=2039e9,
        flops_per_second=312e12,
        link_bytes_per_second=300e9,
        is_unrolled=True,
        compiler_options={},
    ),
    "l40s": Chip(
        kind="NVIDIA L40S",
        platform="gpu",
        hbm_bytes=int(44.4 * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=864e9,
        flops_per_second=362e12,
        link_bytes_per_second=32e9,  # PCIe 4.0
        is_unrolled=True,
        compiler_options={},
    ),
    "rtx4090": Chip(
        kind="NVIDIA GeForce RTX 4090",
        platform="gpu",
        hbm_bytes=int(23.5 * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=1008e9,
        flops_per_second=165e12,
        link_bytes_per_second=32e9,  # PCIe 4.0
        is_unrolled=True,
        compiler_options={},
    ),
    "rtx5090": Chip(
        kind="NVIDIA GeForce RTX 5090",
        platform="gpu",
        hbm_bytes=int(31.4 * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=1792e9,
        flops_per_second=209e12,
        link_bytes_per_second=64e9,  # PCIe 5.0
        is_unrolled=True,
        compiler_options={},
    ),
    "cpu": Chip(
        kind="cpu", platform="cpu", hbm_bytes=0, hbm_bytes_per_second=0.0, is_unrolled=False, compiler_options={}
    ),
}

# Rematerialization is off because XLA does not see that a step updates the cache in place. With a cache of a third of
# the memory or more, it assumes that memory is short, and computes projections and gathered pages twice (docs/log).
#
# XLA's Triton matmuls that load their operands through the copy engine (TMA) fail with CUDA_ERROR_ILLEGAL_INSTRUCTION
# at their first copy, if autotuning selects one (jax 0.11.2, Hopper; docs/log). The override file lists configurations
# without TMA. Fusion autotuning may select TMA as well but accepts no such list, so it is off, and each fusion uses the
# emitter that XLA's cost model selects.
_GPU_OPTIONS: dict[str, str | bool] = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_gemm_autotuner_override_file": str(Path(__file__).with_name("gpu_gemms.txtpb")),
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
# What goes into CUDA graphs if our own calls are launched one by one instead, and for which programs this is done:
# those whose weights take longer to read (1.3 ms at 3 TB/s) than the host takes to launch their kernels.
_GRAPHS_WITHOUT_CALLS, _LONG_PROGRAM_BYTES = "FUSION,CUBLAS,CUBLASLT,CUDNN", 4 << 30
_SLICE = re.compile(r"(?P<chip>[a-z0-9]+):(?P<shape>\d+(x\d+){0,2})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A named machine: a TPU slice ("v6e:2x4"), or the GPUs or virtual CPU devices of a host ("h100:8", "cpu:4")."""

    name: str
    chip: Chip
    num_devices: int

    def mesh(self, tensor_parallelism: int = 0) -> Mesh:
        """Returns a mesh over the target's devices, which need not be present on this host.

        Args:
          tensor_parallelism: number of devices to use; 0 uses all of them.

        Raises:
          NoCompilerError: the compiler for these devices is not installed.
          ValueError: the slice shape does not exist for this chip, the slice has too few devices, or the target is a
            CPU target.
        """
        topology = _topology(self)
        return make_mesh(tensor_parallelism or self.num_devices, topology.devices)


def target(name: str) -> Target:
    """Parses a target name: a chip of `CHIPS`, a colon, and the slice shape or the number of devices.

    Raises:
      ValueError: the name does not have this form, or the chip is unknown.
    """
    match = _SLICE.fullmatch(name)
    chip = CHIPS.get(match["chip"]) if match is not None else None
    num_chips = math.prod(map(int, match["shape"].split("x"))) if match is not None else 0
    if match is None or chip is None or not num_chips or (chip.platform == "tpu") != ("x" in match["shape"]):
        raise ValueError(
            f"target is {name!r}; it takes CHIP:SHAPE with a chip of {', '.join(CHIPS)}, for example v6e:2x4, h100:8 "
            "or cpu:4."
        )
    return Target(name=name, chip=chip, num_devices=num_chips * chip.devices_per_chip)


def chip_of(device: jax.Device) -> Chip | None:
    """Returns the `Chip` of an accelerator, or None for a CPU or an accelerator not in `CHIPS`."""
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind != "cpu"), None)


def compiler_options(
    mesh: Mesh, *, has_library_gemms: bool = False, awaited_weights: object = None
) -> dict[str, str | bool]:
    """Returns XLA's compiler options for programs over this mesh.

    Args:
      mesh: the mesh that the programs run on.
      has_library_gemms: on a GPU, always use cuBLAS for matrix multiplications instead of autotuning XLA's own kernels
        against it. cuBLAS then reads a layer's weights in place; after autotuning, XLA first copies them for cuBLAS.
      awaited_weights: the shapes of the weights of a program for which the device waits, because it is not dispatched
        ahead. On a GPU, a long one then begins with its first kernels while the host launches the others: it has short
        CUDA graphs between our own calls instead of a long one, of which nothing runs until all of it is launched.
    """
    device = mesh.devices.flat[0]
    if device.platform == "gpu":
        options = dict(_GPU_OPTIONS)
        if has_library_gemms:
            options["xla_gpu_enable_triton_gemm"] = False
        awaited_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(awaited_weights))
        if awaited_bytes >= _LONG_PROGRAM_BYTES * mesh.size:
            options["xla_gpu_enable_command_buffer"] = _GRAPHS_WITHOUT_CALLS
        return options
    chip = chip_of(device)
    if chip is None:
        return {}
    return {**chip.compiler_options, **(chip.sum_options if mesh.size > 1 else {})}


def _topology(target: Target) -> topologies.TopologyDescription:
    chip = target.chip
    if chip.platform == "cpu":
        raise ValueError(f"{target.name} needs no target compiler: use virtual CPU devices of this host.")
    if chip.platform == "gpu" and not chip.is_hopper:
        raise NoCompilerError(f"programs for {target.name} can be compiled on such GPUs only. Omit --compile.")
    if chip.platform == "gpu":
        return gpu_topology(
            kind=chip.kind,
            hbm_bytes=chip.hbm_bytes,
            hbm_bytes_per_second=int(chip.hbm_bytes_per_second),
            num_devices=target.num_devices,
        )
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=target.name)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{target.name} is not a slice that libtpu knows: {error}") from None
    except (RuntimeError, NotImplementedError) as error:
        raise NoCompilerError(
            f"programs for {target.name} need the TPU compiler: {error}. Install meshserve with the extra [tpu]."
        ) from None
