"""Times sequences of calls that a device runs without waiting for the host."""

import time
from collections.abc import Callable
from typing import Any

import jax


def timed_ms(
    run: Callable[[Any], Any], state: Any, per_state: int, rounds: int, seconds: float
) -> tuple[list[float], Any]:
    """Returns the milliseconds of one of the `per_state` units of `run`, one figure per round, and the last state.

    A round is a sequence of calls that the device runs without waiting for the host, each fed with the state of the
    previous one. The same number of rounds runs before, untimed. All timed rounds together take `seconds`.
    """
    state = jax.block_until_ready(run(state))
    start = time.perf_counter()
    state = jax.block_until_ready(run(run(run(state))))
    calls = max(2, int(seconds / rounds / max((time.perf_counter() - start) / 3, 1e-5)))
    figures = []
    for _ in range(2 * rounds):
        start = time.perf_counter()
        for _ in range(calls):
            state = run(state)
        jax.block_until_ready(state)
        figures.append((time.perf_counter() - start) * 1e3 / calls / per_state)
    return figures[rounds:], state
