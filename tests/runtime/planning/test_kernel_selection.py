"""What "auto" stands for, and what happens where it cannot be had."""

import logging
from collections.abc import Iterator

import jax
import pytest

from meshserve.kernels.p2p import P2PGroup, check, reference
from meshserve.kernels.p2p import gpu as p2p_gpu
from meshserve.runtime.api.config import ServeConfig
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.planning import kernel_selection
from meshserve.runtime.planning.kernel_selection import named_kernels
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

MODEL = named_model("qwen3-8b")


def named(*, platform: str = "gpu", num_devices: int = 4, refusal: str | None = None, **options: object) -> ServeConfig:
    config = ServeConfig(model="random", **options)
    return named_kernels(config, MODEL, platform=platform, num_devices=num_devices, refusal=refusal)


@pytest.mark.parametrize(
    ("case", "all_reduce"),
    [
        ({}, "p2p"),
        ({"num_devices": 2}, "p2p"),
        ({"num_devices": 1}, "xla"),
        ({"num_devices": 8}, "xla"),  # not measured
        ({"platform": "tpu"}, "xla"),
        ({"platform": "cpu"}, "xla"),
        ({"refusal": "no Hopper GPU"}, "xla"),
        ({"decode_layers": "off"}, "xla"),
        ({"coordinator": "host:1"}, "xla"),
        ({"all_reduce": "xla"}, "xla"),
        ({"num_devices": 8, "all_reduce": "p2p"}, "p2p"),
    ],
    ids=str,
)
def test_gpus_of_one_process_with_our_layers_are_peers(case: dict[str, object], all_reduce: str) -> None:
    assert named(**case).all_reduce == all_reduce


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """GPUs of one host, played by CPU devices: they are peers, and add up right."""
    monkeypatch.setattr(kernel_selection, "named_kernels", lambda config, *_, **__: named())
    p2p = lambda _, devices: P2PGroup(axis=TENSOR_AXIS, ordinals=tuple(range(len(devices))))  # noqa: E731
    monkeypatch.setattr(kernel_selection.p2p_gpu, "open_p2p_group", p2p)
    monkeypatch.setattr(kernel_selection.p2p_gpu, "p2p_all_reduce", reference.p2p_all_reduce)
    monkeypatch.setattr(kernel_selection, "_tried_sums", {})
    kernel_selection._p2p_refusal.cache_clear()
    yield monkeypatch
    kernel_selection._p2p_refusal.cache_clear()


def all_reduce_here(num_devices: int = 4, *, is_start: bool = True) -> str:
    config = ServeConfig(model="random", tp=num_devices)
    return kernel_selection.kernels_here(config, MODEL, make_mesh(num_devices), are_devices_idle=is_start).all_reduce


def test_gpus_that_are_no_peers_add_up_by_xla(host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> P2PGroup:
        raise p2p_gpu.P2PError("no peer access")

    host.setattr(kernel_selection.p2p_gpu, "open_p2p_group", refuse)
    with caplog.at_level(logging.WARNING):
        assert all_reduce_here() == "xla"
    assert "the GPUs cannot be peers, and XLA's sums are slower: no peer access" in caplog.text


def test_a_start_tries_sums_once_and_a_change_of_degree_none(host: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    host.setattr(kernel_selection.check, "num_wrong_elements", lambda mesh, *_: tried.append(mesh.size) or 0)
    assert (all_reduce_here(4), all_reduce_here(4), all_reduce_here(2, is_start=False)) == ("p2p",) * 3
    assert tried == [4]


def test_after_wrong_sums_xla_adds_up_at_every_degree(
    host: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(x: jax.Array, p2p: P2PGroup) -> jax.Array:
        return jax.numpy.where(jax.lax.axis_index(TENSOR_AXIS) == 2, x, reference.p2p_all_reduce(x, p2p))

    host.setattr(kernel_selection.p2p_gpu, "p2p_all_reduce", late)
    with caplog.at_level(logging.WARNING):
        assert all_reduce_here() == "xla"
    assert "elements of sums were wrong" in caplog.text
    assert all_reduce_here(2, is_start=False) == "xla"


def test_gpus_that_stop_in_a_sum_end_the_start_with_a_way_out(host: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    host.setattr(kernel_selection.check, "num_wrong_elements", stop)
    host.setattr(kernel_selection.p2p_gpu, "timeouts", lambda: "P2P timeout: GPU 0 waited for GPU 1")
    with pytest.raises(ConfigError, match="P2P timeout: GPU 0 waited for GPU 1. Start with --all-reduce xla."):
        all_reduce_here()


def test_the_reference_of_peers_adds_up() -> None:
    p2p = P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1))
    assert check.num_wrong_elements(make_mesh(2), p2p, reference, max_bytes=1 << 20) == 0
