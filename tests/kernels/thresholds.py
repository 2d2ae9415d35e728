"""Checks in float64, by sorting, what sampling filters keep of rows of logits, and provides such rows."""

import numpy as np

FILTERS = [
    {"top_k": 1}, {"top_k": 20}, {"top_k": 5_000}, {"top_p": 0.95}, {"top_p": 0.5}, {"top_p": 1e-9}, {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.01}, {"top_p": 0.95, "temperature": 0.3}, {"top_p": 0.999, "min_p": 1e-6},
]  # fmt: skip
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def parameters(num: int, **filters: float) -> dict[str, np.ndarray]:
    """Returns the same filter parameters for each of `num` rows."""
    values = {**OFF, **filters}
    return {name: np.full(num, value, np.int32 if name == "top_k" else np.float32) for name, value in values.items()}


def rows(num: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Returns [num, vocab] float32 rows: spread, flat, dominated, with ties, with excluded tokens, huge, tiny."""
    draw = np.random.default_rng(seed)
    normal = draw.standard_normal((num, vocab)).astype(np.float32)
    kinds = [
        3 * normal, 0.01 * normal, np.where(normal == normal.max(axis=1, keepdims=True), 40, normal), np.round(normal),
        np.where(draw.random(normal.shape) < 0.7, -np.inf, normal), 1e30 * normal, 1e-30 * normal, normal - 90,
        np.zeros_like(normal), np.where(normal > 0, 1.0, -1.0), -np.abs(normal) ** 3,
    ]  # fmt: skip
    return np.stack([kinds[index % len(kinds)][index] for index in range(num)]).astype(np.float32)


def key_of(x: np.ndarray) -> np.ndarray:
    bits = np.where(x == 0, np.float32(0), x).astype(np.float32).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | 0x80000000).astype(np.uint32)


def keeps_the_right_tokens(
    row: np.ndarray, threshold: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> bool:
    """Returns whether a row's threshold keeps what the filters keep.

    Rounding may decide about tokens at the very edge of the sets of top-p and min-p.
    """
    values = row.astype(np.float64)
    is_kept = (key_of(row) >= threshold) & np.isfinite(values)  # excluded tokens are never drawn
    weights = np.exp((values - values.max()) / temperature)
    may = np.isfinite(values)
    if min_p:
        sure, never = weights >= min_p * (1 + 1e-4), weights < min_p * (1 - 1e-4)
        if is_kept[never].any() or (not top_k and top_p == 1.0 and not is_kept[sure].all()):
            return False
        may &= ~never
    if top_k:
        least = np.sort(values[may])[-min(top_k, may.sum())]
        if is_kept[values < least].any() or (top_p == 1.0 and not min_p and not is_kept[values >= least].all()):
            return False
        may &= values >= least
    if top_p < 1.0:
        share = weights[is_kept].sum() / weights[may].sum()
        without_least = weights[is_kept & (values > values[is_kept].min())].sum() / weights[may].sum()
        edge = 1e-5 * (1 + (min_p > 0) * 1e3)
        return bool(not is_kept[~may].any() and share >= top_p - edge and without_least <= top_p + edge)
    return True
