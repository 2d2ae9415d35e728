"""Generates requests as clients send them: random lengths, prompts with shared prefixes, and arrival times."""

import itertools
import math
import random
from dataclasses import dataclass

from .workloads import MAX_TOKEN_ID, Work


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: fixed:N, uniform:LOW:HIGH, or lognormal:MEDIAN:SIGMA:HIGH, cut off at HIGH."""

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parses the text form; raises ValueError if it is invalid."""
        kind, *numbers = text.split(":")
        if {"fixed": 1, "uniform": 2, "lognormal": 3}.get(kind) != len(numbers):
            allowed = "fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:HIGH"
            raise ValueError(f"{text!r} is not a length distribution; allowed are {allowed}.")
        values = tuple(float(number) for number in numbers)
        is_upside_down = kind == "uniform" and values[0] > values[1]
        if is_upside_down or any(not math.isfinite(value) or value <= 0 for value in values):
            raise ValueError(f"{text!r} is not a length distribution; numbers must be above 0, and LOW at most HIGH.")
        return cls(kind, values)

    def __str__(self) -> str:
        """The text form."""
        return ":".join((self.kind, *(f"{value:g}" for value in self.values)))

    def draw(self, source: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.values[0])
        if self.kind == "uniform":
            return source.randint(int(self.values[0]), int(self.values[1]))
        median, sigma, high = self.values
        return max(1, min(int(high), round(source.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A set of random requests; a prompt is one of `num_prefixes` shared prefixes, followed by its own tokens."""

    num_requests: int
    input_lengths: Lengths
    output_lengths: Lengths
    num_prefix_tokens: int = 0
    num_prefixes: int = 1
    vocab_size: int = MAX_TOKEN_ID + 1
    seed: int = 0

    def requests(self) -> list[Work]:
        source = random.Random(self.seed)
        max_id = min(MAX_TOKEN_ID, self.vocab_size - 1)

        def ids(num_tokens: int) -> list[int]:
            return [source.randint(0, max_id) for _ in range(num_tokens)]

        prefixes = [ids(self.num_prefix_tokens) for _ in range(self.num_prefixes)]
        return [
            Work(source.choice(prefixes) + ids(self.input_lengths.draw(source)), self.output_lengths.draw(source))
            for _ in range(self.num_requests)
        ]

    def arrivals(self, rate: float) -> list[float]:
        """Returns arrival times in seconds, a Poisson process with `rate` requests per second (all 0 if infinite)."""
        source = random.Random(self.seed + 1)
        gaps = (source.expovariate(rate) if math.isfinite(rate) else 0.0 for _ in range(self.num_requests))
        return list(itertools.accumulate(gaps))
