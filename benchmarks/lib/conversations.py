"""Measures conversations that return, turn after turn, with more context than the devices hold."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from .gpu_power import PowerWatch, at_power
from .restored_prefix import EngineClock, random_prompt
from .workloads import OUTPUT_TOKENS, conversations

SIDES = ("with", "without")  # host memory
_WARM = 1000  # number of the first prompt that only warms up


def measure_conversations(
    server: EngineClock, num_users: int, num_turns: int, turn_tokens: int, at_a_time: int, *, sides: Sequence[str]
) -> None:
    """Prints how long all turns take, the first-token times of each turn, and where the time went.

    Args:
      at_a_time: Turns that run at the same time; the next begins when the one `at_a_time` before it has ended.
      sides: "with" and "without" host memory, in the order in which they are measured.
    """
    for number in range(2):
        server.first_token_seconds(random_prompt(_WARM + number, num_turns * turn_tokens))
    results: dict[str, float] = {}
    for name in sides:
        server.keep_pages(name == "with")
        before = dataclasses.asdict(server.host.counts)
        server.steps.reset()
        with PowerWatch() as watch:
            started = time.perf_counter()
            seconds, by_turn = _serve(server, num_users, num_turns, turn_tokens, at_a_time)
            power = at_power(watch.between(started, started + seconds))
        results[name] = min(seconds, results.get(name, seconds))
        counts = {key: count - before[key] for key, count in dataclasses.asdict(server.host.counts).items()}
        turns = " ".join(f"{1e3 * np.median(turn):.0f}" for turn in by_turn)
        print(f"{name} host memory: {num_users} users, {num_turns} turns of {turn_tokens} tokens, {at_a_time} at a "
              f"time: {seconds:.2f} s; first token of each turn {turns} ms; "
              f"restored {counts['num_restored'] * server.host.size.page_bytes / 1e9:.1f} GB{power}")  # fmt: skip
        print(server.steps)
        print(" ".join(f"{key}={count}" for key, count in counts.items()), flush=True)
    if len(results) > 1:
        print(f"throughput with host memory: {results['without'] / results['with']:.2f} times that without", flush=True)


def _serve(
    server: EngineClock, num_users: int, num_turns: int, turn_tokens: int, at_a_time: int
) -> tuple[float, Sequence[Sequence[float]]]:
    """Serves all turns, `at_a_time` at a time. Returns the seconds, and those to the first tokens of each turn."""
    submitted: list[tuple[int, str, float]] = []
    turns = list(conversations(num_users, num_turns, turn_tokens))
    started = time.perf_counter()
    for turn in turns:
        if len(submitted) >= at_a_time:
            server.clock.wait(server.engine, [submitted[-at_a_time][1]])
        name = server.submit(turn.prompt_token_ids, OUTPUT_TOKENS)
        submitted.append((turn.number, name, time.perf_counter()))
    server.clock.wait(server.engine, [name for _, name, _ in submitted])
    seconds = time.perf_counter() - started
    by_turn: list[list[float]] = [[] for _ in range(num_turns)]
    for number, name, sent in submitted:
        by_turn[number].append(server.clock.times[name][0] - sent)
    return seconds, by_turn
