"""What GPUs say about themselves, as the driver reports it, for tests that need no GPU."""

from types import SimpleNamespace
from typing import Any

from meshserve.sharding.chips import GIB, GPUAttributes

# By the name of the target: name, compute capability, GiB and multiprocessors that the driver reports.
CARDS = {
    "a100": ("NVIDIA A100-SXM4-80GB", "8.0", 79.25, 108),
    "a100-pcie": ("NVIDIA A100 80GB PCIe", "8.0", 79.25, 108),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", "8.0", 39.39, 108),
    "a100-pcie-40gb": ("NVIDIA A100-PCIE-40GB", "8.0", 39.39, 108),
    "a30": ("NVIDIA A30", "8.0", 23.60, 56),
    "a10": ("NVIDIA A10", "8.6", 22.06, 72),
    "a40": ("NVIDIA A40", "8.6", 44.35, 84),
    "rtxa6000": ("NVIDIA RTX A6000", "8.6", 47.54, 84),
    "rtx3090": ("NVIDIA GeForce RTX 3090", "8.6", 23.69, 82),
    "l4": ("NVIDIA L4", "8.9", 22.03, 58),
    "l40": ("NVIDIA L40", "8.9", 44.39, 142),
    "l40s": ("NVIDIA L40S", "8.9", 44.39, 142),
    "rtx6000ada": ("NVIDIA RTX 6000 Ada Generation", "8.9", 47.50, 142),
    "rtx4090": ("NVIDIA GeForce RTX 4090", "8.9", 23.64, 128),
    "h100": ("NVIDIA H100 80GB HBM3", "9.0", 79.11, 132),
    "h100-pcie": ("NVIDIA H100 PCIe", "9.0", 79.11, 114),
    "h100-nvl": ("NVIDIA H100 NVL", "9.0", 93.01, 132),
    "h20": ("NVIDIA H20", "9.0", 95.00, 78),
    "h200": ("NVIDIA H200", "9.0", 139.80, 132),
    "h200-nvl": ("NVIDIA H200 NVL", "9.0", 139.80, 132),
    "gh200": ("NVIDIA GH200 480GB", "9.0", 94.50, 132),
    "gh200-144gb": ("NVIDIA GH200 144G HBM3e", "9.0", 142.70, 132),
    "b200": ("NVIDIA B200", "10.0", 178.36, 148),
    "gb200": ("NVIDIA GB200", "10.0", 184.31, 152),
    "b300": ("NVIDIA B300 SXM6 AC", "10.3", 267.69, 148),
    "gb300": ("NVIDIA GB300", "10.3", 276.62, 152),
    "rtx5090": ("NVIDIA GeForce RTX 5090", "12.0", 31.36, 170),
    "rtxpro6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", 94.97, 188),
    "rtxpro6000-server": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", 94.97, 188),
    "gb10": ("NVIDIA GB10", "12.1", 119.70, 48),
}


def attributes(card: str, **changes: Any) -> GPUAttributes:
    """Returns what the driver says about a card, with some of it changed."""
    name, capability, gib, num_multiprocessors = CARDS[card]
    major, _, minor = capability.partition(".")
    found = GPUAttributes(name, (int(major), int(minor)), int(gib * GIB), num_multiprocessors)
    return found._replace(**changes)


def device(card: str) -> Any:
    """Returns a device as jax describes it, without asking the driver: its memory is unknown."""
    name, capability, _, num_multiprocessors = CARDS[card]
    return SimpleNamespace(
        platform="gpu",
        device_kind=name,
        compute_capability=capability,
        core_count=num_multiprocessors,
        process_index=0,
        local_hardware_id=0,
    )
