"""Tests what a server gets on each kind of GPU by default, from devices that need not exist."""

import dataclasses
from typing import Any, NamedTuple

import pytest

from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan import tp_choice
from meshserve.runtime.plan.memory_plan import Planner
from meshserve.runtime.resolve.resolved_server import resolve_for
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import CHIPS, GPUAttributes, Target, gpu_of
from tests.sharding import gpu_cards

SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
HOPPER, PORTABLE = ("cuda", "cuda"), ("portable", "off")


class Expected(NamedTuple):
    """The defaults of Qwen3-8B on one GPU, and the TP sizes of the 0.6B and the 8B among eight."""

    kernels: tuple[str, str]  # attention and decode layers
    max_running: int
    max_step_tokens: int
    max_prefill_tokens: int
    tp: tuple[int, int]


# On GPUs other than Hopper, limits follow from the shares of a data sheet that the kernels reached on an H200.
CARDS = {
    "a100": Expected(PORTABLE, 256, 8192, 1024, (1, 8)),
    "a100-pcie": Expected(PORTABLE, 256, 8192, 1024, (1, 8)),
    "a100-40gb": Expected(PORTABLE, 256, 8192, 1024, (1, 8)),
    "a100-pcie-40gb": Expected(PORTABLE, 256, 8192, 1024, (1, 8)),
    "a30": Expected(PORTABLE, 128, 4096, 512, (1, 8)),
    "a10": Expected(PORTABLE, 128, 4096, 512, (8, 8)),
    "a40": Expected(PORTABLE, 256, 8192, 512, (1, 8)),
    "rtxa6000": Expected(PORTABLE, 256, 8192, 512, (1, 8)),
    "rtx3090": Expected(PORTABLE, 128, 4096, 256, (1, 8)),
    "l4": Expected(PORTABLE, 128, 4096, 512, (8, 8)),
    "l40": Expected(PORTABLE, 256, 8192, 512, (1, 8)),
    "l40s": Expected(PORTABLE, 256, 8192, 1024, (1, 8)),
    "rtx6000ada": Expected(PORTABLE, 256, 8192, 1024, (1, 8)),
    "rtx4090": Expected(PORTABLE, 128, 4096, 512, (1, 8)),
    "h100": Expected(HOPPER, 256, 8192, 4096, (4, 4)),
    "h100-pcie": Expected(HOPPER, 256, 8192, 2048, (1, 8)),
    "h100-nvl": Expected(HOPPER, 256, 8192, 4096, (1, 8)),
    "h20": Expected(HOPPER, 256, 8192, 512, (4, 4)),
    "h200": Expected(HOPPER, 256, 8192, 4096, (1, 4)),
    "h200-nvl": Expected(HOPPER, 256, 8192, 4096, (1, 8)),
    "gh200": Expected(HOPPER, 256, 8192, 4096, (4, 4)),
    "gh200-144gb": Expected(HOPPER, 256, 8192, 4096, (1, 4)),
    "b200": Expected(PORTABLE, 256, 8192, 8192, (1, 8)),
    "gb200": Expected(PORTABLE, 256, 8192, 8192, (1, 8)),
    "b300": Expected(PORTABLE, 256, 8192, 8192, (1, 8)),
    "gb300": Expected(PORTABLE, 256, 8192, 8192, (1, 8)),
    "rtx5090": Expected(PORTABLE, 256, 8192, 512, (1, 8)),
    "rtxpro6000": Expected(PORTABLE, 256, 8192, 2048, (1, 8)),
    "rtxpro6000-server": Expected(PORTABLE, 256, 8192, 2048, (1, 8)),
    "gb10": Expected(PORTABLE, 256, 8192, 512, (8, 8)),
}


@pytest.mark.parametrize("card", gpu_cards.CARDS)
def test_each_card_gets_kernels_limits_and_a_tp_size_that_suit_it(card: str) -> None:
    config, model = ServeConfig(model=LARGE), named_model(LARGE)
    server = resolve_for(config, model, chip=CHIPS[card], num_devices=1)
    names, limits = server.kernel_names, server.step_limits
    devices: list[Any] = [gpu_cards.device(card)] * 8
    tp = [tp_choice.choose_tp(ServeConfig(model=size), named_model(size), devices) for size in (SMALL, LARGE)]
    found = Expected(
        (names.attention, names.decode_layers),
        limits.max_running,
        limits.max_step_tokens,
        limits.max_prefill_tokens,
        (tp[0], tp[1]),
    )
    assert found == CARDS[card]


def planned(chip: Any, size: str, scheme: str = "none") -> int:
    """Returns how many tokens fit into the cache on one GPU; raises MemoryError if none do."""
    target = Target(name="one", chip=chip, num_devices=1)
    config = ServeConfig(model=size, quantize=scheme)
    return Planner.on(target, config, named_model(size, scheme), num_devices=1).plan().served_tokens


@pytest.mark.parametrize("card", [card for card in gpu_cards.CARDS if CHIPS[card].hbm_bytes < 25 << 30])
def test_an_8b_in_8_bits_starts_on_24_gib(card: str) -> None:
    assert planned(CHIPS[card], LARGE, "fp8-block") > 64 * 1024
    assert planned(CHIPS[card], LARGE) > 20 * 1024


def test_a_4b_starts_on_12_gib() -> None:
    chip = gpu_of(GPUAttributes("NVIDIA GeForce RTX 3060", (8, 6), 12_042 << 20, 28, 1.78e9, 3.6e11))
    assert chip.is_estimated
    assert planned(chip, "qwen3-4b") > 16 * 1024
    assert planned(chip, LARGE, "int4") > 24 * 1024


def test_the_memory_of_one_card_does_not_change_the_kernels_of_another() -> None:
    """The limits of Hopper GPUs were measured: more memory or bandwidth leaves them as they are."""
    larger = dataclasses.replace(CHIPS["h200"], hbm_bytes=2 * CHIPS["h200"].hbm_bytes)
    found = [
        resolve_for(ServeConfig(model=LARGE), named_model(LARGE), chip=chip, num_devices=1).step_limits
        for chip in (CHIPS["h200"], larger)
    ]
    assert found[0] == found[1]
