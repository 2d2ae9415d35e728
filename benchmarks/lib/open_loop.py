"""Sends requests at the times of a Poisson process, and searches for the highest rate that meets latency bounds.

Uses only the standard library, because baselines in other interpreters import it.

Times are those of the caller. A gap is the time between two messages of a request that carry tokens, which is ITL in
vLLM's serving benchmark: a message with several tokens ends one gap. Gaps of 0 between its tokens would halve the share
of long gaps for an engine that sends two tokens at a time. The time to the first token begins when the request was due,
so a late sender does not shorten it.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from .token_times import percentile
from .traffic import Lengths, Traffic
from .workloads import MAX_TOKEN_ID, Work

# Streams one request at a temperature: the number of tokens of each message.
Stream = Callable[[Work, float], AsyncIterator[int]]

_STEPS_PER_OCTAVE = 16  # rates of a search are first_rate * 2 ** (step / 16), so engines are compared at equal rates
_FIRST_STRIDE = 8  # steps to the second rate
_HOPELESS = 0.03  # share of gaps or requests beyond a bound: the P97 is, so the P99 is far from it
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 0.5  # after a rate that was stopped, for the engine to drop its requests
_LEAST_SHARE = 1.4  # a rate is begun only if its arrivals' time times this is left: requests end after the last one
_WARM_UP_SEED = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """A search for the highest rate at which the P99s of gaps and of first tokens stay within bounds.

    Arrivals of every rate are the same unit Poisson process, scaled. Prompts are drawn for each rate from a seed of its
    own, so that no rate finds another's prompts in a prefix cache.

    Attributes:
      input_tokens, output_tokens: Length distributions, in the text form of `Lengths`.
      rates: Requests per second to run instead of a search, in this order.
      num_rates: Maximum number of rates.
      arrival_seconds: Requests arrive during this time, at each rate.
      warm_up_seconds: The same for an untimed run at the first rate.
      max_seconds: For all rates together; none is begun that may take longer.
    """

    input_tokens: str
    output_tokens: str
    first_rate: float
    rates: Sequence[float] = ()
    num_rates: int = 6
    arrival_seconds: float = 15.0
    warm_up_seconds: float = 4.0
    max_seconds: float = 90.0
    gap_ms: float = 50.0
    first_ms: float = 500.0
    temperature: float = 0.0
    seed: int = 0
    vocab_size: int = MAX_TOKEN_ID + 1

    def requests(self, rate: float, seconds: float, seed: int) -> tuple[list[Work], list[float]]:
        """Returns the requests of a rate and their arrival times."""
        traffic = Traffic(
            num_requests=max(1, round(rate * seconds)),
            input_lengths=Lengths.parse(self.input_tokens),
            output_lengths=Lengths.parse(self.output_tokens),
            vocab_size=self.vocab_size,
            seed=seed,
        )
        arrivals = traffic.arrivals(rate)
        return dataclasses.replace(traffic, seed=seed + round(1000 * rate)).requests(), arrivals


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateResult:
    """The figures of one rate; times in ms.

    Attributes:
      num_messages: Messages with tokens; as many as tokens if none carries two.
      is_stopped: The run was ended early, because a bound was far out of reach. Its figures are of the part that ran.
      is_within: It ran to its end, no request failed, and both P99s are within their bounds.
      error: The first failure of a request, if any.
    """

    rate: float
    num_requests: int
    num_tokens: int
    num_messages: int
    seconds: float
    gap_p50: float
    gap_p99: float
    first_p50: float
    first_p99: float
    is_stopped: bool
    is_within: bool
    error: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def verdict(self) -> str:
        if self.error:
            return f"failed: {self.error}"
        return "stopped early" if self.is_stopped else "within" if self.is_within else "beyond"

    def __str__(self) -> str:
        return (
            f"{self.rate:.2f} requests/s: gaps P50 {self.gap_p50:.1f}, P99 {self.gap_p99:.1f} ms; first token P50 "
            f"{self.first_p50:.0f}, P99 {self.first_p99:.0f} ms; {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.num_requests} requests in {self.seconds:.1f} s; {self.verdict}"
        )


class LoadClock:
    """Records the messages of requests that are due at given times, and tells when the bounds are out of reach.

    Times are in seconds from the start of the load.
    """

    def __init__(self, works: Sequence[Work], arrivals: Sequence[float], search: OpenLoop):
        self._works, self._arrivals, self._search = works, arrivals, search
        self._last: dict[int, float] = {}
        self._firsts: list[float] = []
        self._gaps: list[float] = []
        self._num_tokens = 0
        self._num_long_gaps = 0
        self._num_failed = 0
        self._error = ""

    def add(self, index: int, now: float, num_tokens: int) -> None:
        """Adds a message of request `index`."""
        if not num_tokens:
            return
        self._num_tokens += num_tokens
        if index in self._last:
            gap = now - self._last[index]
            self._gaps.append(gap)
            self._num_long_gaps += 1e3 * gap > self._search.gap_ms
        else:
            self._firsts.append(now - self._arrivals[index])
        self._last[index] = now

    def fail(self, error: str) -> None:
        self._num_failed += 1
        self._error = self._error or error

    def is_hopeless(self, now: float) -> bool:
        """Returns whether even the P97 will be beyond a bound, or requests still run long after they should have ended.

        A request within the bounds ends at the latest after the bound of its first token and one gap for each other.
        """
        search, num_requests = self._search, len(self._works)
        most_gaps = sum(work.max_tokens for work in self._works) - num_requests
        first_seconds = search.first_ms / 1e3
        num_waiting = sum(
            index not in self._last and now - due > first_seconds for index, due in enumerate(self._arrivals)
        )
        num_late = sum(first > first_seconds for first in self._firsts) + num_waiting
        longest = max(work.max_tokens for work in self._works) * search.gap_ms / 1e3
        return (
            self._num_long_gaps > _HOPELESS * most_gaps
            or num_late + self._num_failed > max(1, _HOPELESS * num_requests)
            or now > self._arrivals[-1] + first_seconds + longest
        )

    def result(self, rate: float, seconds: float, is_stopped: bool) -> RateResult:
        gap_p99, first_p99 = 1e3 * percentile(self._gaps, 99), 1e3 * percentile(self._firsts, 99)
        return RateResult(
            rate=rate,
            num_requests=len(self._works),
            num_tokens=self._num_tokens,
            num_messages=len(self._gaps) + len(self._firsts),
            seconds=seconds,
            gap_p50=1e3 * percentile(self._gaps, 50),
            gap_p99=gap_p99,
            first_p50=1e3 * percentile(self._firsts, 50),
            first_p99=first_p99,
            is_stopped=is_stopped,
            is_within=not (is_stopped or self._error)
            and gap_p99 <= self._search.gap_ms
            and first_p99 <= self._search.first_ms,
            error=self._error,
        )


async def run_rate(stream: Stream, search: OpenLoop, rate: float, seconds: float, seed: int) -> RateResult:
    """Sends the requests of a rate and waits until all have ended, or the bounds are out of reach."""
    works, arrivals = search.requests(rate, seconds, seed)
    clock = LoadClock(works, arrivals, search)
    began = time.perf_counter()

    async def send(index: int) -> None:
        await asyncio.sleep(max(0.0, began + arrivals[index] - time.perf_counter()))
        num_tokens = 0
        try:
            async for number in stream(works[index], search.temperature):
                clock.add(index, time.perf_counter() - began, number)
                num_tokens += number
            if num_tokens != works[index].max_tokens:
                clock.fail(f"{num_tokens} tokens instead of {works[index].max_tokens}")
        except Exception as error:
            clock.fail(f"{type(error).__name__}: {error}".partition("\n")[0])

    pending: set[asyncio.Task[None]] = {asyncio.create_task(send(index)) for index in range(len(works))}
    is_stopped = False
    while pending and not is_stopped:
        _, pending = await asyncio.wait(pending, timeout=_POLL_SECONDS)
        is_stopped = bool(pending) and clock.is_hopeless(time.perf_counter() - began)
    result = clock.result(rate, time.perf_counter() - began, is_stopped)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return result


async def run_rates(stream: Stream, search: OpenLoop, show: Callable[[str], None]) -> list[RateResult]:
    """Runs the warm-up and then one rate after the other; `show` gets a line for each."""
    rates = list(search.rates)
    first_rate = rates[0] if rates else search.first_rate
    await run_rate(stream, search, first_rate, search.warm_up_seconds, search.seed + _WARM_UP_SEED)
    began = time.perf_counter()
    results: list[RateResult] = []
    while len(results) < (len(rates) or search.num_rates):
        rate = rates[len(results)] if rates else next_rate(search.first_rate, results)
        left = search.max_seconds - (time.perf_counter() - began)
        if rate is None or (results and left < _LEAST_SHARE * search.arrival_seconds):
            break
        results.append(await run_rate(stream, search, rate, search.arrival_seconds, search.seed))
        show(str(results[-1]))
        if results[-1].is_stopped:
            await asyncio.sleep(_SETTLE_SECONDS)
    return results


def next_rate(first_rate: float, results: Sequence[RateResult]) -> float | None:
    """Returns the next rate of a search, or None if two neighbouring rates are on either side of the bounds.

    It moves by half an octave until one rate is within the bounds and a higher one is not, and then bisects.
    """
    steps = {round(_STEPS_PER_OCTAVE * math.log2(each.rate / first_rate)): each.is_within for each in results}
    if not steps:
        return first_rate
    beyond = min((step for step, is_within in steps.items() if not is_within), default=None)
    within = max((step for step, ok in steps.items() if ok and (beyond is None or step < beyond)), default=None)
    if beyond is None:
        step = max(steps) + _FIRST_STRIDE
    elif within is None:
        step = beyond - _FIRST_STRIDE
    else:
        step = (within + beyond) // 2
    return None if step in steps else first_rate * 2 ** (step / _STEPS_PER_OCTAVE)


def highest_rate(results: Sequence[RateResult], gap_ms: float) -> float:
    """Returns the rate at which the P99 of gaps reaches its bound; 0 if no rate was within the bounds.

    Interpolates the logarithm of the P99 linearly between the highest rate within the bounds and the next one above. If
    that one did not run to its end, or missed only the bound of first tokens, it returns the rate within the bounds.
    """
    lowest_beyond = min((each.rate for each in results if not each.is_within), default=math.inf)
    within = max(
        (each for each in results if each.is_within and each.rate < lowest_beyond),
        key=lambda each: each.rate,
        default=None,
    )
    if within is None:
        return 0.0
    beyond = next((each for each in results if each.rate == lowest_beyond), None)
    if beyond is None or beyond.is_stopped or beyond.error or not within.gap_p99 < gap_ms < beyond.gap_p99:
        return within.rate
    share = math.log(gap_ms / within.gap_p99) / math.log(beyond.gap_p99 / within.gap_p99)
    return within.rate + share * (beyond.rate - within.rate)


def search_from(raw: dict[str, Any] | None) -> OpenLoop | None:
    """Returns a search from its fields, as they are in JSON."""
    return None if raw is None else OpenLoop(**{**raw, "rates": tuple(raw["rates"])})
