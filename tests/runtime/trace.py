"""Generates traffic as a server sees it, for the simulation and the real engine.

Lengths are log-normal, arrivals Poisson with bursts. Some prompts begin with one of a few long system prompts, some
continue an earlier conversation including its output, and the rest are new.
"""

import math
import random
from dataclasses import dataclass

from meshserve.runtime.api.request import RequestOptions


@dataclass(frozen=True)
class Arrival:
    """One request, with its arrival step, and the number of steps after which the caller cancels it, if any."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    options: RequestOptions  # timeout_seconds counts steps
    cancel_after_steps: int | None
    follows: int | None  # index of the arrival whose prompt and output are prepended to this prompt


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The parameters of the traffic."""

    num_requests: int
    max_context: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    requests_per_step: float
    vocab: range
    num_shared_prompts: int = 4


def make_trace(rng: random.Random, traffic: Traffic) -> list[Arrival]:
    """Returns arrivals in order of time, with `num_requests` samples (an arrival with n samples counts n times)."""
    shared = [
        (salt, _tokens(rng, traffic.vocab, rng.randint(traffic.max_context // 8, traffic.max_context // 3)))
        for salt in ("", "", "tenant a", "tenant b")[: traffic.num_shared_prompts]
    ]
    arrivals: list[Arrival] = []
    step, num_left = 0.0, traffic.num_requests
    while num_left > 0:
        is_burst = rng.random() < 0.05
        for _ in range(rng.randint(5, 20) if is_burst else 1):
            n = rng.choice((2, 3, 4)) if rng.random() < 0.05 else 1
            arrivals.append(_arrival(rng, traffic, int(step), min(n, num_left), shared, len(arrivals)))
            num_left -= min(n, num_left)
            step += rng.expovariate(traffic.requests_per_step) * (0.2 if is_burst else 1.0)
            if num_left <= 0:
                break
    return arrivals


def _arrival(
    rng: random.Random, traffic: Traffic, step: int, n: int, shared: list[tuple[str, tuple[int, ...]]], index: int
) -> Arrival:
    salt, prompt, follows = "", (), None
    kind = rng.random()
    if kind < 0.4:
        salt, prompt = rng.choice(shared)
    elif kind < 0.6 and index:
        follows = rng.randrange(max(index - 50, 0), index)
    prompt += _tokens(rng, traffic.vocab, _length(rng, traffic.mean_prompt_tokens, traffic.max_context // 2))
    prompt = prompt[: traffic.max_context * 3 // 4]
    return Arrival(
        step=step,
        prompt=prompt,
        max_tokens=_length(rng, traffic.mean_output_tokens, traffic.max_context // 2),
        ignore_eos=rng.random() < 0.5,
        options=RequestOptions(
            n=n,
            priority=rng.choice((0, 0, 0, 0, 1, 2, -1)),
            cache_salt=salt,
            timeout_seconds=rng.uniform(1.0, 400.0) if rng.random() < 0.1 else None,
        ),
        cancel_after_steps=rng.randint(0, 100) if rng.random() < 0.1 else None,
        follows=follows,
    )


def _tokens(rng: random.Random, vocab: range, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(vocab, k=count))


def _length(rng: random.Random, mean: float, longest: int) -> int:
    return max(1, min(int(rng.lognormvariate(math.log(mean) - 0.5, 1.0)), longest))
