"""Shared parts of the kernel benchmarks: large random arrays, and timing of sequences of calls."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DISPATCHES = 8  # timed separately; few enough that the host never waits for room in the queue


@partial(jax.jit, static_argnums=(0, 1, 2))
def random_array(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> jax.Array:
    """Makes values with random signs and mantissas and magnitudes from 2^-6 to 2^-5, about the spread of trained
    weights.

    Built from random bits, so that an array of many gigabytes needs no second one.
    """
    key = jnp.array([seed, 1, 2, 3], jnp.uint32)
    if dtype == "bfloat16":
        _, bits = jax.lax.rng_bit_generator(key, shape, jnp.uint16)
        return jax.lax.bitcast_convert_type((bits & 0x807F) | 0x3C80, jnp.bfloat16)
    _, bits = jax.lax.rng_bit_generator(key, shape, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits & np.uint32(0x807FFFFF)) | np.uint32(0x3C800000), jnp.float32)


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


def time_steps(run: Callable[[], jax.Array], rounds: int, steps: int) -> tuple[list[float], float]:
    """Returns the milliseconds per step of each timed round, and the host's median milliseconds per dispatch.

    The same number of rounds runs before, untimed.
    """
    times, dispatches = [], []
    for number in range(2 * rounds):
        started = time.perf_counter()
        for _ in range(steps):
            sampled = run()
        jax.block_until_ready(sampled)
        if number >= rounds:
            times.append(1000 * (time.perf_counter() - started) / steps)
        started = time.perf_counter()
        for _ in range(_DISPATCHES):
            sampled = run()
        dispatches.append(1000 * (time.perf_counter() - started) / _DISPATCHES)
        jax.block_until_ready(sampled)
    return times, statistics.median(dispatches)
