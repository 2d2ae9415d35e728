"""The metrics of a mixture of experts."""

import numpy as np

from meshserve.runtime.program.expert_balance import ExpertBalance
from meshserve.runtime.telemetry.metrics import Metrics


def test_a_model_with_experts_tells_their_tokens():
    metrics = Metrics()
    before = {family.name for family in metrics.registry.collect()}
    balance = ExpertBalance(
        expert_tokens=np.array([4, 0, 2]), device_tokens=np.array([4, 2]), expert_imbalance=2.0, device_imbalance=1.5
    )
    metrics.read_expert_balance = lambda: balance
    value = metrics.registry.get_sample_value
    assert [value("meshserve_expert_tokens_total", {"expert": str(expert)}) for expert in range(3)] == [4, 0, 2]
    assert [value("meshserve_device_expert_tokens_total", {"device": str(device)}) for device in range(2)] == [4, 2]
    assert value("meshserve_expert_imbalance_ratio", {"of": "experts"}) == 2.0
    assert value("meshserve_expert_imbalance_ratio", {"of": "devices"}) == 1.5
    added = {family.name for family in metrics.registry.collect()} - before
    assert added == {"meshserve_expert_tokens", "meshserve_device_expert_tokens", "meshserve_expert_imbalance_ratio"}
