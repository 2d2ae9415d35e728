"""Models that are too large are refused before a weight is read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup import launch as launching
from meshserve.runtime.startup.launch import launch
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from meshserve.sharding import memory
from meshserve.sharding.mesh import make_mesh

GIB = 2**30


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_a_model_larger_than_the_host_is_refused_before_it_is_read(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model's 6.1 MB on a machine with 4 MiB; its files are not even opened."""

    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(launching, "load_model", read)
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 4 * 2**20)
    model = "demo"
    if form == "orbax":
        model = str(tmp_path)
        for path in DEMO_DIRECTORY.glob("*.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(MemoryError, match=r"take 0.01 GiB on each of 1 cpu device.* 0.00 GiB, 0.01 GiB too little"):
        launch(ServeConfig(model=model, cache_dir=""), lambda outputs: None)


def test_the_message_says_what_is_short_and_by_how_much() -> None:
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 80 * GIB, "bytes_in_use": 8 * GIB})
    mesh = SimpleNamespace(devices=np.array([device, device]), local_devices=[device], size=2)
    memory.check_weights_fit(mesh, 0.9, 63 * GIB, page_bytes=GIB)  # 72 - 8 = 64
    memory.check_weights_fit(mesh, 0.9, 66 * GIB, held_bytes=2 * GIB)
    with pytest.raises(MemoryError) as caught:
        memory.check_weights_fit(mesh, 0.9, 65 * GIB + GIB // 2, page_bytes=GIB // 4)
    assert str(caught.value) == (
        "the weights and one page of the KV cache take 65.75 GiB on each of 2 gpu device(s); the memory that "
        "memory_fraction 0.9 leaves there is 64.00 GiB, 1.75 GiB too little. Raise tp, raise memory_fraction, or use a "
        "smaller dtype. No weight was read."
    )


@pytest.mark.parametrize("stats", [None, {}])
def test_devices_that_do_not_tell_want_a_number_of_pages(stats: dict | None) -> None:
    device = SimpleNamespace(platform="proxy", memory_stats=lambda: stats)
    mesh = SimpleNamespace(devices=np.array([device]), local_devices=[device], size=1)
    memory.check_weights_fit(mesh, 0.9, 10**15)
    with pytest.raises(MemoryError, match="--num-pages"):
        memory.num_pages_that_fit(mesh, 0.9, 2**20)


def test_virtual_devices_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 8 * GIB)
    memory.check_weights_fit(make_mesh(8), 0.9, GIB)
    with pytest.raises(MemoryError, match="1.25 GiB on each of 8 cpu device.*is 1.00 GiB, 0.25 GiB too little"):
        memory.check_weights_fit(make_mesh(8), 0.9, GIB + GIB // 4)


def test_the_host_tells_what_is_free() -> None:
    assert 2**20 < memory.host_free_bytes() <= 2**62
