"""The table of NVIDIA GPUs, and how one is found in it: by compute capability, multiprocessors, memory, then its name.

Speeds are those of the data sheets: dense operations, with sums in float32. `GiB` is what CUDA reports, with error
correction where a card has it on by default; 10 % more or less is the same card. Links are NVLink where every GPU of a
host is connected to every other, else PCIe.
"""

import re
from typing import NamedTuple

from .chip import GIB, Chip

_MEMORY_TOLERANCE = 0.1  # error correction takes a sixteenth of GDDR6
_BIN_TOLERANCE = 0.08  # difference in multiprocessors among cards of one name


class GPUAttributes(NamedTuple):
    """What a GPU says about itself. 0 stands for what it does not say."""

    name: str  # as the driver reports it
    compute_capability: tuple[int, int] | None
    memory_bytes: int = 0
    num_multiprocessors: int = 0
    clock_hz: float = 0.0  # the highest of the multiprocessors
    bytes_per_second: float = 0.0  # the memory's clock times the width of its bus


class _Card(NamedTuple):
    """A row of the table."""

    name: str  # the name as a target
    kind: str  # what the driver calls it
    pattern: str  # matches the cards' names
    compute_capability: tuple[int, int]
    gib: float
    num_multiprocessors: int
    gigabytes_per_second: float
    bfloat16_teraflops: float
    fp8_teraflops: float
    float32_teraflops: float  # outside of the tensor cores
    link_gigabytes_per_second: float  # in each direction


_CARDS = (
    # name, kind, pattern, compute capability, GiB, multiprocessors, GB/s, TFLOPS in bfloat16, FP8, float32, link GB/s
    _Card("a100", "NVIDIA A100-SXM4-80GB", r"A[18]00.SXM4?-80GB", (8, 0), 79.1, 108, 2039, 312, 0, 19.5, 300),
    _Card("a100-pcie", "NVIDIA A100 80GB PCIe", r"A[18]00 80GB PCIe", (8, 0), 79.1, 108, 1935, 312, 0, 19.5, 32),
    _Card("a100-40gb", "NVIDIA A100-SXM4-40GB", r"A100.SXM4?-40GB", (8, 0), 39.4, 108, 1555, 312, 0, 19.5, 300),
    _Card("a100-pcie-40gb", "NVIDIA A100-PCIE-40GB", r"A100-PCIe-40GB", (8, 0), 39.4, 108, 1555, 312, 0, 19.5, 32),
    _Card("a30", "NVIDIA A30", r"\bA30\b", (8, 0), 23.5, 56, 933, 165, 0, 10.3, 32),
    _Card("a10", "NVIDIA A10", r"\bA10\b", (8, 6), 22.1, 72, 600, 125, 0, 31.2, 32),
    _Card("a40", "NVIDIA A40", r"\bA40\b", (8, 6), 44.4, 84, 696, 149.7, 0, 37.4, 32),
    _Card("rtxa6000", "NVIDIA RTX A6000", r"\bA6000\b", (8, 6), 47.5, 84, 768, 154.8, 0, 38.7, 32),
    _Card("rtx3090", "NVIDIA GeForce RTX 3090", r"RTX 3090\b(?! Ti)", (8, 6), 23.7, 82, 936, 71, 0, 35.6, 32),
    _Card("l4", "NVIDIA L4", r"\bL4\b", (8, 9), 22.0, 58, 300, 121, 242, 30.3, 32),
    _Card("l40", "NVIDIA L40", r"\bL40\b", (8, 9), 44.4, 142, 864, 181, 362, 90.5, 32),
    _Card("l40s", "NVIDIA L40S", r"\bL40S\b", (8, 9), 44.4, 142, 864, 362, 733, 91.6, 32),
    _Card("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", r"6000 Ada", (8, 9), 47.5, 142, 960, 364, 728, 91.1, 32),
    _Card("rtx4090", "NVIDIA GeForce RTX 4090", r"RTX 4090\b(?! D)", (8, 9), 23.5, 128, 1008, 165, 330, 82.6, 32),
    _Card("h100", "NVIDIA H100 80GB HBM3", r"\bH[18]00\b(?! (PCIe|NVL))", (9, 0), 79.2, 132, 3350, 989, 1979, 67, 450),
    _Card("h100-pcie", "NVIDIA H100 PCIe", r"\bH[18]00 PCIe", (9, 0), 79.2, 114, 2000, 756, 1513, 51, 64),
    _Card("h100-nvl", "NVIDIA H100 NVL", r"\bH100 NVL", (9, 0), 93.1, 132, 3900, 835, 1671, 60, 64),
    _Card("h20", "NVIDIA H20", r"\bH20\b", (9, 0), 95.1, 78, 4000, 148, 296, 44, 450),
    _Card("h200", "NVIDIA H200", r"\bH200\b(?! NVL)", (9, 0), 139.8, 132, 4800, 989, 1979, 67, 450),
    _Card("h200-nvl", "NVIDIA H200 NVL", r"\bH200 NVL", (9, 0), 139.8, 132, 4800, 836, 1671, 60, 64),
    _Card("gh200", "NVIDIA GH200 480GB", r"\bGH200 480GB", (9, 0), 94.5, 132, 4000, 990, 1979, 67, 450),
    _Card("gh200-144gb", "NVIDIA GH200 144G HBM3e", r"\bGH200 144G", (9, 0), 141.0, 132, 4900, 990, 1979, 67, 450),
    _Card("b200", "NVIDIA B200", r"\bB200\b", (10, 0), 178.4, 148, 7700, 2250, 4500, 75, 900),
    _Card("gb200", "NVIDIA GB200", r"\bGB200\b", (10, 0), 184.3, 152, 8000, 2500, 5000, 80, 900),
    _Card("b300", "NVIDIA B300 SXM6 AC", r"\bB300\b", (10, 3), 268.0, 148, 8000, 2250, 4500, 75, 900),
    _Card("gb300", "NVIDIA GB300", r"\bGB300\b", (10, 3), 276.6, 152, 8000, 2500, 5000, 80, 900),
    _Card("rtx5090", "NVIDIA GeForce RTX 5090", r"RTX 5090\b", (12, 0), 31.4, 170, 1792, 209, 419, 104.8, 64),
    _Card("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", r"PRO 6000 Blackwell(?! Server)",
          (12, 0), 95.0, 188, 1792, 504, 1007, 126, 64),
    _Card("rtxpro6000-server", "NVIDIA RTX PRO 6000 Blackwell Server Edition", r"PRO 6000 Blackwell Server",
          (12, 0), 95.0, 188, 1597, 504, 1007, 120, 64),
    _Card("gb10", "NVIDIA GB10", r"\bGB10\b", (12, 1), 119.7, 48, 273, 125, 250, 31, 25),
)  # fmt: skip

# Dense operations of a multiprocessor in a cycle: in bfloat16 on the tensor cores (a GeForce card has half of them from
# 8.6 on, with sums in float32), and in float32. Before 8.0, bfloat16 is computed in float32.
_OPERATIONS = {
    (7, 0): (128, 128),
    (8, 0): (2048, 128),
    (8, 6): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (1024, 256),
}
_FP8_CAPABILITY = (8, 9)
_GUESSED_CLOCK_HZ, _GUESSED_MULTIPROCESSORS = 1.5e9, 64
_GUESSED_MEMORY_BYTES, _GUESSED_BYTES_PER_SECOND, _GUESSED_LINK = 24 * GIB, 1e12, 32e9


def _chip(card: _Card) -> Chip:
    return Chip(
        name=card.name,
        kind=card.kind,
        platform="gpu",
        hbm_bytes=int(card.gib * GIB),
        jax_fraction=0.75,
        hbm_bytes_per_second=card.gigabytes_per_second * 1e9,
        flops_per_second=card.bfloat16_teraflops * 1e12,
        fp8_flops_per_second=card.fp8_teraflops * 1e12,
        vector_flops_per_second=card.float32_teraflops * 1e12,
        link_bytes_per_second=card.link_gigabytes_per_second * 1e9,
        compute_capability=card.compute_capability,
        num_multiprocessors=card.num_multiprocessors,
        is_unrolled=True,
    )


GPUS = tuple(map(_chip, _CARDS))


def gpu_of(found: GPUAttributes) -> Chip:
    """Returns the GPU of the table that has these attributes, else one that is estimated from them."""
    close = [(card, chip) for card, chip in zip(_CARDS, GPUS, strict=True) if _is_like(card, found)]
    named = [(card, chip) for card, chip in close if re.search(card.pattern, found.name, re.IGNORECASE)]
    if not found.memory_bytes and not named:
        close = []
    candidates = named or close
    if not candidates:
        return _estimated(found)
    return min(candidates, key=lambda pair: abs(pair[1].hbm_bytes - found.memory_bytes))[1]


def _is_like(card: _Card, found: GPUAttributes) -> bool:
    """Returns whether attributes are those of a card, or of one of the same name with a few more units or less."""
    is_named = re.search(card.pattern, found.name, re.IGNORECASE) is not None
    tolerance = _BIN_TOLERANCE * card.num_multiprocessors if is_named else 0
    other = found.num_multiprocessors - card.num_multiprocessors if found.num_multiprocessors else 0
    memory_bytes = card.gib * GIB
    away = found.memory_bytes - memory_bytes if found.memory_bytes else 0
    is_like = abs(other) <= tolerance and abs(away) <= _MEMORY_TOLERANCE * memory_bytes
    return is_like and card.compute_capability == found.compute_capability


def _estimated(found: GPUAttributes) -> Chip:
    """Returns a GPU that no table lists, described by its attributes."""
    capability = found.compute_capability or (0, 0)
    known = [each for each in _OPERATIONS if each <= capability]
    tensor, vector = _OPERATIONS[max(known)] if known else (128, 128)
    if capability >= (8, 6) and "GeForce" in found.name:
        tensor //= 2
    cycles = (found.clock_hz or _GUESSED_CLOCK_HZ) * (found.num_multiprocessors or _GUESSED_MULTIPROCESSORS)
    return Chip(
        name=found.name,
        kind=found.name,
        platform="gpu",
        hbm_bytes=found.memory_bytes or _GUESSED_MEMORY_BYTES,
        jax_fraction=0.75,
        hbm_bytes_per_second=found.bytes_per_second or _GUESSED_BYTES_PER_SECOND,
        flops_per_second=cycles * tensor,
        fp8_flops_per_second=2 * cycles * tensor if capability >= _FP8_CAPABILITY else 0.0,
        vector_flops_per_second=cycles * vector,
        link_bytes_per_second=_GUESSED_LINK,
        compute_capability=found.compute_capability,
        num_multiprocessors=found.num_multiprocessors,
        is_estimated=True,
        is_unrolled=True,
    )
