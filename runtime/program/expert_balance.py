"""How evenly tokens fall on experts and devices. numpy only."""

from dataclasses import dataclass

import numpy as np

from meshserve.sharding.expert_layout import ExpertLayout


@dataclass(frozen=True, kw_only=True)
class ExpertBalance:
    """How a server's tokens fell on its experts and devices. A token counts once for each expert it chose."""

    expert_tokens: np.ndarray  # [experts] int64, over all layers, since the server started or its TP size changed
    device_tokens: np.ndarray  # [devices] int64: what each had to compute of them
    # The highest count over the mean, averaged over layers, in the last one to two minutes; 1 is even, 0 unknown.
    expert_imbalance: float
    device_imbalance: float


def imbalance(counts: np.ndarray) -> float:
    """Returns the highest count over the mean of [layers, experts or devices], averaged over layers with tokens."""
    counts = counts[counts.any(axis=1)]
    return float((counts.max(axis=1) / counts.mean(axis=1)).mean()) if len(counts) else 0.0


def device_counts(counts: np.ndarray, layout: ExpertLayout) -> np.ndarray:
    """Returns the tokens of each device in each layer, [layers, devices], from those of the experts."""
    if not layout.is_by_expert:
        return np.repeat(counts.sum(axis=1, keepdims=True), layout.num_shards, axis=1)  # a slice of every expert
    padded = np.pad(counts, ((0, 0), (0, layout.num_rows - counts.shape[1])))
    return padded.reshape(len(counts), layout.num_shards, -1).sum(axis=2)
