"""Names target machines for offline planning, and describes their devices to the compiler."""

import dataclasses
import math
import re

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from ..mesh import make_mesh
from .chip import Chip
from .gpus import GPUS
from .topology import NoCompilerError, gpu_topology
from .tpus import CPU, TPUS

CHIPS = {chip.name: chip for chip in (*TPUS, *GPUS, CPU)}
_SLICE = re.compile(r"(?P<chip>[a-z0-9-]+):(?P<shape>\d+(x\d+){0,2})")


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


def _topology(target: Target) -> topologies.TopologyDescription:
    chip = target.chip
    if chip.platform == "cpu":
        raise ValueError(f"{target.name} needs no target compiler: use virtual CPU devices of this host.")
    if chip.platform == "gpu" and not chip.is_hopper:
        raise NoCompilerError(f"programs for {target.name} can be compiled on such GPUs only. Omit --compile.")
    if chip.platform == "gpu":
        return gpu_topology(chip, target.num_devices)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=target.name)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"{target.name} is not a slice that libtpu knows: {error}") from None
    except (RuntimeError, NotImplementedError) as error:
        raise NoCompilerError(
            f"programs for {target.name} need the TPU compiler: {error}. Install meshserve with the extra [tpu]."
        ) from None
