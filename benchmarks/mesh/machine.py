"""Describes the machine that is measured, without starting JAX on it, whose memory the measured processes need."""

import dataclasses
import subprocess

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.sharding.chips import CHIPS, Chip, GPUAttributes, gpu_of

_USABLE_FRACTION = 0.85  # share of a device's memory for weights; the rest is for the KV cache and scratch memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of this host. A dry run has virtual CPU devices, which are compared with the roofline of H200s."""

    num_devices: int
    device: str
    chip: Chip
    is_virtual: bool = False

    def holds(self, model: ModelConfig, tp: int, weight_bytes: float) -> bool:
        """Returns whether the weights of a model fit on `tp` devices, at `weight_bytes` bytes a weight."""
        return model.num_params * weight_bytes / tp <= _USABLE_FRACTION * self.chip.hbm_bytes

    def __str__(self) -> str:
        return f"{self.num_devices} x {self.device}"


def virtual_machine(num_devices: int) -> Machine:
    """Returns a machine of virtual CPU devices."""
    return Machine(num_devices=num_devices, device="virtual CPU device", chip=CHIPS["h200"], is_virtual=True)


def find_machine() -> Machine:
    """Returns the GPUs of this host.

    Raises:
      ConfigError: There are not several GPUs of one kind.
    """
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"nvidia-smi finds no GPU ({error}). Try a dry run on virtual CPU devices: --cpu-devices 4."
        ) from None
    names = [line.partition(",")[0] for line in lines]
    if len(names) < 2 or len(set(names)) > 1:
        raise ConfigError(
            f"this host has {len(names)} GPU(s): {', '.join(names)}. Allowed are two or more of one kind."
        )
    name, capability, mebibytes = (field.strip() for field in lines[0].split(","))
    major, _, minor = capability.partition(".")
    found = GPUAttributes(name, (int(major), int(minor)), memory_bytes=int(mebibytes) << 20)
    return Machine(num_devices=len(names), device=name, chip=gpu_of(found))
