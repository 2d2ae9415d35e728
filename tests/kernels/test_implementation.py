"""Tests how an implementation is chosen from an ordered list, and that the lists agree with the options."""

import dataclasses
from typing import Any

import pytest

from meshserve.kernels import decode_layers, experts, implementation, linear, p2p, paged_attention, readback, sampling
from meshserve.kernels.implementation import Choice, Cost, Device, Implementation, Refusal, choose, in_order, named
from meshserve.runtime.options.serve_config import options

GPU, CPU = Device("gpu", "some GPU", (8, 0)), Device("cpu", "cpu")
LISTS = {
    "attention": paged_attention.IMPLEMENTATIONS,
    "decode_layers": decode_layers.IMPLEMENTATIONS,
    "linear": linear.IMPLEMENTATIONS,
    "moe_backend": experts.IMPLEMENTATIONS,
    "all_reduce": p2p.IMPLEMENTATIONS,
}


def no_gpu(device: Device) -> str | None:
    return None if device.platform == "gpu" else f"it needs a GPU, not a {device.platform} device"


def odd(number: int) -> str | None:
    return f"{number} is odd" if number % 2 else None


FAST = Implementation[int](name="fast", unsupported_device=no_gpu, unsupported_shapes=odd, automatic_on=("gpu",))
UNBUILT = Implementation[int](name="unbuilt", unavailable_reason=lambda: "no compiler", automatic_on=("gpu",))
PLAIN = Implementation[int](name="plain", automatic_on=("cpu", "gpu"))
TESTED = Implementation[int](name="tested")
LIST = in_order(FAST, UNBUILT, PLAIN, TESTED)


@pytest.mark.parametrize(
    ("device", "number", "asked", "is_present", "chosen", "refusals"),
    [
        (GPU, 2, "auto", False, FAST, []),
        (GPU, 3, "auto", False, UNBUILT, [("fast", "3 is odd")]),
        (GPU, 3, "auto", True, PLAIN, [("fast", "3 is odd"), ("unbuilt", "no compiler", True)]),
        (GPU, None, "auto", True, FAST, []),
        (CPU, 2, "auto", True, PLAIN, []),
        (Device("tpu"), 2, "auto", True, None, []),
        (CPU, 2, "tested", True, TESTED, []),
        (CPU, 2, "fast", True, None, [("fast", "it needs a GPU, not a cpu device")]),
        (GPU, 3, "fast", True, None, [("fast", "3 is odd")]),
        (GPU, 2, "unbuilt", True, None, [("unbuilt", "no compiler", True)]),
        (GPU, 2, "unbuilt", False, UNBUILT, []),
    ],
)
def test_the_first_that_can_serve_is_chosen_and_reasons_are_kept(
    device: Device, number: int | None, asked: str, is_present: bool, chosen: object, refusals: list[tuple[Any, ...]]
) -> None:
    found = choose(LIST, device, number, asked=asked, is_present=is_present)
    assert found == Choice(chosen, tuple(Refusal(*refusal) for refusal in refusals))


def test_nothing_is_built_for_shapes_that_are_not_supported() -> None:
    def build() -> str | None:
        raise AssertionError("built")

    watched = in_order(dataclasses.replace(FAST, unavailable_reason=build), PLAIN)
    assert choose(watched, GPU, 3, is_present=True).implementation is PLAIN


def test_a_name_that_cannot_run_says_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation.Device, "of", lambda device: CPU)
    assert named(LIST, "speed", "plain", None) is PLAIN
    with pytest.raises(ValueError, match="speed is 'best'; this build has fast, unbuilt, plain, tested."):
        named(LIST, "speed", "best", None)
    with pytest.raises(ValueError, match="speed 'fast' cannot run: it needs a GPU, not a cpu device. Use 'plain'."):
        named(LIST, "speed", "fast", None)


def test_devices_are_described_by_what_they_are() -> None:
    assert Device.of().platform == "cpu" and Device.of().compute_capability is None


def test_costs_add_up_and_scratch_memory_is_used_again() -> None:
    one = Cost(num_bytes=1, operations=2, fp8_operations=3, float32_operations=4, num_launches=5, scratch_bytes=6)
    assert one + one.times(2) == Cost(
        num_bytes=3, operations=6, fp8_operations=9, float32_operations=12, num_launches=15, scratch_bytes=6
    )


@pytest.mark.parametrize("option", LISTS)
def test_every_implementation_is_a_value_of_its_option(option: str) -> None:
    values = set(options()[option].choices) - {"auto", "off" if option == "decode_layers" else "xla"}
    assert values == LISTS[option].keys() - {"xla"}


@pytest.mark.parametrize("found", [*LISTS.values(), sampling.IMPLEMENTATIONS, readback.IMPLEMENTATIONS])
def test_an_automatic_kernel_refuses_other_devices(found: dict[str, Implementation]) -> None:
    for each in found.values():
        if len(each.automatic_on) == 1:
            assert each.unsupported_device(CPU), each.name
