"""Tests that the P2P all-reduce is opened and tested before it serves, and what happens if it fails."""

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import Mesh

from meshserve.kernels import p2p
from meshserve.kernels.p2p import P2PGroup, check, reference
from meshserve.kernels.p2p.sm90 import P2PError
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.resolve import kernel_selection, p2p_selection
from meshserve.runtime.resolve.kernel_names import KernelNames
from meshserve.runtime.resolve.kernel_selection import KernelSelection, NamedKernels, select_kernels
from meshserve.runtime.resolve.kernel_shapes import KernelShapes
from meshserve.runtime.resolve.p2p_selection import P2PFindings
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh
from tests.runtime.resolve.test_kernel_selection import HOPPER, named, shapes

NAMES = named(HOPPER, shapes(4))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes CPU devices look like GPUs of one host with P2P access and right sums."""

    def open_group(_: str, devices: list[jax.Device]) -> P2PGroup:
        return P2PGroup(axis=TENSOR_AXIS, ordinals=tuple(range(len(devices))))

    def kernels(names: KernelNames, shapes: KernelShapes, mesh: Mesh, group: P2PGroup | None) -> Kernels:
        return Kernels(attend=None, p2p=group)

    monkeypatch.setattr(kernel_selection, "name_kernels", lambda *_, **__: NamedKernels(NAMES, ()))
    monkeypatch.setattr(kernel_selection, "_kernels", kernels)
    replace(monkeypatch, open_group=open_group, operations=reference)
    return monkeypatch


def replace(monkeypatch: pytest.MonkeyPatch, **parts: object) -> None:
    """Replaces parts of the implementation."""
    monkeypatch.setitem(p2p.IMPLEMENTATIONS, "p2p", dataclasses.replace(p2p.IMPLEMENTATIONS["p2p"], **parts))


def select(num_devices: int = 4, findings: P2PFindings | None = None) -> KernelSelection:
    config = ServeConfig(model="random", tp=num_devices)
    found = select_kernels(config, shapes(num_devices), make_mesh(num_devices), findings)
    assert (found.kernels.p2p is not None) == found.names.has_p2p
    return found


def test_gpus_without_p2p_access_use_xla(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> P2PGroup:
        raise P2PError("no peer access")

    replace(host, open_group=refuse)
    with caplog.at_level(logging.WARNING):
        assert select().names.all_reduce == "xla"
    assert "the GPUs have no P2P access; using XLA's all-reduce, which is slower: no peer access" in caplog.text


def counting(tried: list[int]) -> Callable[..., int]:
    return lambda mesh, *_: tried.append(mesh.size) or 0


def test_sums_are_tested_at_startup_and_not_when_the_tp_size_changes(host: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    host.setattr(check, "num_wrong_elements", counting(tried))
    first = select(4)
    second = select(2, first.findings)
    assert (first.names.all_reduce, second.names.all_reduce) == ("p2p", "p2p")
    assert tried == [4]
    assert second.findings == first.findings == P2PFindings()


def test_after_wrong_sums_every_tp_size_uses_xla(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def late(x: jax.Array, p2p: P2PGroup) -> jax.Array:
        return jax.numpy.where(jax.lax.axis_index(TENSOR_AXIS) == 2, x, reference.p2p_all_reduce(x, p2p))

    replace(host, operations=SimpleNamespace(p2p_all_reduce=late))
    host.setattr(p2p_selection, "p2p_max_bytes", lambda num_devices: 256 << 10)  # a CPU sums 8 MiB in half a minute
    with caplog.at_level(logging.WARNING):
        found = select()
    assert found.names.all_reduce == "xla"
    assert "elements of sums were wrong" in caplog.text
    tried: list[int] = []
    host.setattr(check, "num_wrong_elements", counting(tried))
    assert select(2, found.findings).names.all_reduce == "xla"
    assert select(2).names.all_reduce == "p2p", "nothing is remembered outside of the findings"
    assert tried == [2]


def test_gpus_that_stop_during_a_sum_end_the_startup_with_a_remedy(host: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    host.setattr(check, "num_wrong_elements", stop)
    host.setattr(p2p_selection, "timeouts", lambda: "P2P timeout: GPU 0 waited for GPU 1")
    with pytest.raises(ConfigError, match="P2P timeout: GPU 0 waited for GPU 1. Start with --all-reduce xla."):
        select()


def test_the_reference_sums_are_right() -> None:
    group = P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1))
    assert check.num_wrong_elements(make_mesh(2), group, reference, max_bytes=1 << 20) == 0
