"""The mesh, where arrays lie on it, and how many pages fit."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshserve.sharding import memory
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh, named_sharding, partition_spec, use_cpu_devices


def test_a_mesh_takes_the_first_devices():
    mesh = make_mesh(4)
    assert mesh.axis_names == (TENSOR_AXIS,)
    assert list(mesh.devices) == jax.devices()[:4]
    assert list(make_mesh(2, jax.devices()[5:]).devices) == jax.devices()[5:7]


def test_too_few_devices_are_counted():
    with pytest.raises(ValueError, match=r"tp is 9 but jax sees 8 cpu device\(s\). Lower tp, or .*--cpu-devices"):
        make_mesh(9)


def test_devices_cannot_be_changed_once_they_are_in_use():
    assert jax.device_count() == 8
    with pytest.raises(RuntimeError):
        use_cpu_devices(4)


def test_logical_axes_name_mesh_axes():
    assert partition_spec(("vocab", None)) == PartitionSpec(TENSOR_AXIS, None)
    assert partition_spec(()) == PartitionSpec()
    with pytest.raises(KeyError, match="heads"):
        partition_spec(("heads",))


def test_named_axes_are_cut_and_others_are_replicated():
    mesh = make_mesh(4)
    sharding = named_sharding(mesh, (None, "mlp"))
    assert sharding.shard_shape((3, 8)) == (3, 2)
    assert named_sharding(mesh, (None, None)).is_fully_replicated


def test_pages_share_what_is_free(monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh(2)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh, fraction, kept_bytes: 1000)
    assert memory.num_pages_that_fit(mesh, 0.85, page_bytes=300) == 3
    assert memory.num_pages_that_fit(mesh, 0.85, page_bytes=1000) == 1
    with pytest.raises(MemoryError, match="less than one page .* Raise tp"):
        memory.num_pages_that_fit(mesh, 0.85, page_bytes=1001)


def test_the_fullest_device_decides():
    def device(bytes_in_use: int) -> SimpleNamespace:
        stats = {"bytes_limit": 1000, "bytes_in_use": bytes_in_use}
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    devices = [device(100), device(300)]
    mesh = SimpleNamespace(devices=np.array(devices), local_devices=devices)
    assert memory.free_bytes(mesh, 0.9) == 600


def test_virtual_devices_share_a_modest_part_of_the_host():
    assert memory.free_bytes(make_mesh(8), 0.85) * 8 == memory.free_bytes(make_mesh(1), 0.85) == 2**30
