"""What "auto" stands for, and what happens where it cannot be had."""

import logging

import jax
import pytest

from meshserve.kernels.peers import Peers, check, reference
from meshserve.runtime import kernel_choice
from meshserve.runtime.config import ServeConfig
from meshserve.runtime.kernel_choice import named_kernels
from meshserve.runtime.model_sizes import named_model
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh

MODEL = named_model("qwen3-8b")


def named(*, platform: str = "gpu", num_devices: int = 4, refusal: str | None = None, **options: object) -> ServeConfig:
    config = ServeConfig(model="random", **options)
    return named_kernels(config, MODEL, platform=platform, num_devices=num_devices, refusal=refusal)


@pytest.mark.parametrize(
    ("case", "all_reduce"),
    [
        ({}, "peers"),
        ({"num_devices": 2}, "peers"),
        ({"num_devices": 1}, "xla"),
        ({"num_devices": 8}, "xla"),  # not measured
        ({"platform": "tpu"}, "xla"),
        ({"platform": "cpu"}, "xla"),
        ({"refusal": "no Hopper GPU"}, "xla"),
        ({"decode_layers": "off"}, "xla"),
        ({"coordinator": "host:1"}, "xla"),
        ({"all_reduce": "xla"}, "xla"),
        ({"num_devices": 8, "all_reduce": "peers"}, "peers"),
    ],
    ids=str,
)
def test_gpus_of_one_process_with_our_layers_are_peers(case: dict[str, object], all_reduce: str) -> None:
    assert named(**case).all_reduce == all_reduce


def test_gpus_that_are_no_peers_add_up_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "named_kernels", lambda config, *_, **__: named())
    config, mesh = ServeConfig(model="random", tp=4), make_mesh(4)
    for refusal, all_reduce in ((None, "peers"), ("no peer access", "xla")):
        monkeypatch.setattr(kernel_choice, "_peers_refusal", lambda mesh, refusal=refusal: refusal)
        assert kernel_choice.kernels_here(config, MODEL, mesh).all_reduce == all_reduce


def test_wrong_sums_are_a_reason_against_peers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, peers = make_mesh(4), Peers(axis=TENSOR_AXIS, ordinals=(0, 1, 2, 3))
    monkeypatch.setattr(kernel_choice.peers_gpu, "open_peers", lambda *_: peers)
    monkeypatch.setattr(kernel_choice.peers_gpu, "peer_sum", reference.peer_sum)
    kernel_choice._peers_refusal.cache_clear()
    assert kernel_choice._peers_refusal(mesh) is None

    def late(x: jax.Array, peers: Peers) -> jax.Array:
        return jax.numpy.where(jax.lax.axis_index(TENSOR_AXIS) == 2, x, reference.peer_sum(x, peers))

    monkeypatch.setattr(kernel_choice.peers_gpu, "peer_sum", late)
    kernel_choice._peers_refusal.cache_clear()
    with caplog.at_level(logging.WARNING):
        reason = kernel_choice._peers_refusal(mesh)
    assert reason is not None and "elements of sums were wrong" in reason
    assert f"the GPUs are no peers, XLA adds up, which is slower: {reason}" in caplog.text
    kernel_choice._peers_refusal.cache_clear()


def test_the_reference_of_peers_adds_up() -> None:
    peers = Peers(axis=TENSOR_AXIS, ordinals=(0, 1))
    assert check.num_wrong_elements(make_mesh(2), peers, reference) == 0
