"""The counts of chosen experts on the host: copied now and then, wrapping around, by expert and by device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.runtime.program.expert_balance import device_counts, imbalance
from meshserve.runtime.program.expert_tokens import ExpertTokens
from meshserve.sharding.expert_layout import ExpertLayout
from meshserve.sharding.mesh import make_mesh, named_sharding

SHAPE = jax.ShapeDtypeStruct((2, 6), jnp.uint32)
MESH = make_mesh(4)


class Device:
    """Counts on the devices, and a clock."""

    def __init__(self, *, is_by_expert: bool) -> None:
        self.now = 100.0
        layout = ExpertLayout(num_shards=4, num_experts=6, mlp_dim=8, is_by_expert=is_by_expert)
        self.reader = ExpertTokens(layout, SHAPE, MESH.local_devices[1], clock=lambda: self.now)
        self.counts = np.zeros(SHAPE.shape, np.uint32)

    def step(self, added: list[list[int]], seconds: float = 2.0) -> None:
        """Runs a step, which consumes the arrays of the one before it."""
        self.now += seconds
        self.counts = self.counts + np.array(added, np.uint32)
        on_devices = jax.device_put(self.counts, named_sharding(MESH, ()))
        self.reader.observe(on_devices)
        if self.reader._copied is not None:
            self.reader._copied.block_until_ready()
        on_devices.delete()


def test_counts_by_expert_and_by_device():
    device = Device(is_by_expert=True)
    before = device.reader.balance()
    assert not before.expert_tokens.any() and before.device_tokens.tolist() == [0] * 4
    assert before.expert_imbalance == before.device_imbalance == 0
    device.step([[3, 1, 0, 0, 2, 0], [1, 1, 1, 1, 1, 1]])
    balance = device.reader.balance()
    assert balance.expert_tokens.tolist() == [4, 2, 1, 1, 3, 1]
    assert balance.device_tokens.tolist() == [6, 2, 4, 0]  # blocks of two experts; the last device has padding alone
    assert balance.expert_imbalance == (3 + 1) / 2
    assert balance.device_imbalance == pytest.approx((4 / 1.5 + 2 / 1.5) / 2)


def test_by_tensor_every_device_computes_every_token():
    device = Device(is_by_expert=False)
    device.step([[3, 1, 0, 0, 2, 0], [1, 1, 1, 1, 1, 1]])
    balance = device.reader.balance()
    assert balance.device_tokens.tolist() == [12] * 4
    assert (balance.expert_imbalance, balance.device_imbalance) == (2.0, 1.0)


def test_steps_within_a_second_are_read_together_and_none_is_lost():
    device = Device(is_by_expert=False)
    ones = [[1] * 6] * 2
    device.step(ones)
    for _ in range(9):
        device.step(ones, seconds=0.1)
    assert device.reader.balance().expert_tokens.tolist() == [2] * 6
    device.step(ones, seconds=0.2)
    assert device.reader.balance().expert_tokens.tolist() == [22] * 6


def test_counts_that_wrap_around_go_on():
    device = Device(is_by_expert=False)
    for _ in range(3):
        device.step([[2**31, 0, 0, 0, 0, 1]] * 2)
    assert device.reader.balance().expert_tokens.tolist() == [6 * 2**31, 0, 0, 0, 0, 6]


def test_imbalance_forgets_what_is_older_than_two_minutes():
    device = Device(is_by_expert=False)
    device.step([[60, 0, 0, 0, 0, 0]] * 2)
    assert device.reader.balance().expert_imbalance == 6.0
    for _ in range(5):
        device.step([[1] * 6] * 2, seconds=30.0)
    balance = device.reader.balance()
    assert balance.expert_imbalance == 1.0 and balance.expert_tokens.tolist() == [130, *[10] * 5]


def test_imbalance_leaves_out_layers_without_tokens():
    assert imbalance(np.array([[0, 0], [3, 1]])) == 1.5
    assert imbalance(np.zeros((2, 2), np.int64)) == 0.0
    layout = ExpertLayout(num_shards=2, num_experts=3, mlp_dim=8, is_by_expert=True)
    assert device_counts(np.array([[1, 2, 4]]), layout).tolist() == [[3, 4]]
