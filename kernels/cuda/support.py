"""Says which devices can run the CUDA kernels."""

import jax

from meshserve.kernels.implementation import Device

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


def no_hopper(device: Device) -> str | None:
    """Returns why kernels for Hopper GPUs cannot run on a device, or None if they can."""
    if device.platform != "gpu":
        return f"the CUDA kernels need an NVIDIA Hopper GPU; this is a {device.platform} device"
    if device.compute_capability != HOPPER:
        found = "none" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
        return f"the CUDA kernels need compute capability 9.0 (Hopper); {device.name} has {found}"
    return None


def no_ampere(device: Device) -> str | None:
    """Returns why kernels for GPUs since Ampere cannot run on a device, or None if they can."""
    if device.platform != "gpu":
        return f"the CUDA kernels need an NVIDIA GPU; this is a {device.platform} device"
    if device.compute_capability is None or device.compute_capability < AMPERE:
        found = "none" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
        return f"the CUDA kernels need compute capability 8.0 (Ampere) or later; {device.name} has {found}"
    return None


def num_multiprocessors() -> int:
    """Returns those of this process's first GPU, or of an H200 if it has none."""
    gpu = next((device for device in jax.local_devices() if device.platform == "gpu"), None)
    return int(getattr(gpu, "core_count", 132))
