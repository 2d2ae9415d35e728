"""Tests the TP size that a server gets, from devices that need not exist."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan import tp_choice
from meshserve.runtime.weights.registry import named_model
from tests.sharding import gpu_cards

UNKNOWN = SimpleNamespace(device_kind="NVIDIA unheard of", platform="gpu", compute_capability="8.6", core_count=60)
CPU = SimpleNamespace(device_kind="cpu", platform="cpu")


def devices(number: int, kind: Any = "h100", num_processes: int = 1) -> list[Any]:
    """Returns devices, of which `kind` is a card or one device."""
    one = gpu_cards.device(kind) if isinstance(kind, str) else kind
    return [
        SimpleNamespace(**{**vars(one), "process_index": index * num_processes // number}) for index in range(number)
    ]


def chosen(model: str, found: list[Any], **options: Any) -> int:
    return tp_choice.choose_tp(ServeConfig(model=model, **options), named_model(model), found)


@pytest.mark.parametrize(
    ("model", "found", "tp"),
    [
        ("qwen3-0.6b", devices(1), 1),
        ("qwen3-8b", devices(4), 4),
        ("qwen3-8b", devices(8), 4),  # over eight, the all-reduces would take longer than they save
        ("qwen3-32b", devices(6), 4),  # 64 query heads cannot be divided by 5 or 6
        ("qwen3-8b", devices(4, kind=UNKNOWN), 4),
        ("qwen3-8b", devices(8, kind=CPU), 1),
        ("qwen3-8b", devices(8, num_processes=2), 8),
    ],
)
def test_what_the_machine_offers_is_chosen(model: str, found: list[Any], tp: int):
    assert chosen(model, found) == tp


def test_a_size_that_is_asked_for_is_taken():
    assert chosen("qwen3-0.6b", devices(8), tp=4) == 4


def test_a_model_that_fits_on_no_fewer_devices_gets_them():
    """The weights of the 32B take 61 GiB in bfloat16, and a 4090 has 23.5."""
    assert chosen("qwen3-32b", devices(4, kind="rtx4090")) == 4


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, "tp is 3, but the model's 16 query heads cannot be divided by it. Possible: 1, 2, 4.$"),
        (
            8,
            r"tp is 8, but there are 4 NVIDIA H100 80GB HBM3 device\(s\). Possible: 1, 2, 4. To try .* --cpu-devices 8",
        ),
    ],
)
def test_a_size_that_cannot_be_says_which_can(tp: int, message: str):
    with pytest.raises(ConfigError, match=message):
        chosen("qwen3-0.6b", devices(4), tp=tp)
