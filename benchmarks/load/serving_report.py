"""Computes the figures of a load on a server, in the terms and the layout of vLLM's serving benchmark.

TTFT is the time from sending to the first token. TPOT is the remaining time divided by the remaining tokens. ITL is the
gap between messages with tokens. E2EL is the whole time. Failed requests only count as failed, and in no other figure.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from meshserve.benchmarks.lib.token_times import percentile

_WIDTH = 50


@dataclasses.dataclass(kw_only=True)
class Call:
    """One request as its sender saw it, with times in seconds since the start of the load."""

    num_input_tokens: int
    sent: float
    due: float | None = None  # planned sending time, if any
    messages: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # (time, number of tokens)
    ended: float = math.nan
    error: str = ""

    @property
    def num_output_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.messages)

    @property
    def first(self) -> float:
        return self.messages[0][0]

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def e2el(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token, or None with a single token."""
        num_rest = self.num_output_tokens - 1
        return (self.ended - self.first) / num_rest if num_rest else None

    @property
    def gaps(self) -> list[float]:
        times = [time for time, _ in self.messages]
        return [after - before for before, after in zip(times, times[1:], strict=False)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean, median and P99 in milliseconds."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Summary":
        mean = math.fsum(seconds) / len(seconds) if seconds else math.nan
        return cls(mean=1e3 * mean, median=1e3 * percentile(seconds, 50), p99=1e3 * percentile(seconds, 99))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of one load."""

    load: str
    completed: int
    failed: int
    errors: dict[str, int]
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    max_output_tokens_per_s: int
    max_concurrent_requests: int
    total_token_throughput: float
    max_lateness_ms: float  # how late the client itself sent
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary


def figures(load: str, calls: Sequence[Call], goodput: Mapping[str, float] | None = None) -> Figures:
    """Computes the figures of a load; `goodput` maps ttft, tpot and e2el to the limits of a good request, in ms."""
    good = [call for call in calls if not call.error and call.messages]
    duration = max((call.ended for call in calls), default=0.0) - min((call.sent for call in calls), default=0.0)
    num_input = sum(call.num_input_tokens for call in good)
    num_output = sum(call.num_output_tokens for call in good)
    return Figures(
        load=load,
        completed=len(good),
        failed=len(calls) - len(good),
        errors=dict(Counter(call.error or "no tokens" for call in calls if call.error or not call.messages)),
        duration=duration,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(good) / duration,
        request_goodput=sum(is_within(call, goodput) for call in good) / duration if goodput else None,
        output_throughput=num_output / duration,
        max_output_tokens_per_s=max(tokens_by_second(good), default=0),
        max_concurrent_requests=max((num_open for _, num_open in open_requests(calls)), default=0),
        total_token_throughput=(num_input + num_output) / duration,
        max_lateness_ms=1e3 * max((call.sent - call.due for call in calls if call.due is not None), default=0.0),
        ttft=Summary.of([call.ttft for call in good]),
        tpot=Summary.of([call.tpot for call in good if call.tpot is not None]),
        itl=Summary.of([gap for call in good for gap in call.gaps]),
        e2el=Summary.of([call.e2el for call in good]),
    )


def is_within(call: Call, goodput: Mapping[str, float]) -> bool:
    """Returns whether the request met every limit; a request with one token has no TPOT and meets that limit."""
    return all((getattr(call, name) or 0.0) * 1e3 <= limit for name, limit in goodput.items())


def tokens_by_second(calls: Sequence[Call]) -> list[int]:
    """Returns the number of output tokens that arrived in each second of the load."""
    counts = Counter(int(time) for call in calls for time, num_tokens in call.messages for _ in range(num_tokens))
    return [counts[second] for second in range(max(counts, default=-1) + 1)]


def open_requests(calls: Sequence[Call]) -> list[tuple[float, int]]:
    """Returns each time at which the number of open requests changed, with the new number."""
    changes = sorted([(call.sent, 1) for call in calls] + [(call.ended, -1) for call in calls])
    num_open, steps = 0, []
    for time, change in changes:
        num_open += change
        steps.append((time, num_open))
    return steps


def text(found: Figures) -> str:
    """Formats the figures as vLLM's serving benchmark prints them."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def line(title: str, value: str) -> None:
        lines.append(f"{title:<40} {value:<10}".rstrip())

    line("Load:", found.load)
    line("Successful requests:", str(found.completed))
    line("Failed requests:", str(found.failed))
    for error, count in sorted(found.errors.items()):
        line(f"  {error}:", str(count))
    line("Benchmark duration (s):", f"{found.duration:.2f}")
    line("Total input tokens:", str(found.total_input_tokens))
    line("Total generated tokens:", str(found.total_output_tokens))
    line("Request throughput (req/s):", f"{found.request_throughput:.2f}")
    if found.request_goodput is not None:
        line("Request goodput (req/s):", f"{found.request_goodput:.2f}")
    line("Output token throughput (tok/s):", f"{found.output_throughput:.2f}")
    line("Peak output token throughput (tok/s):", f"{found.max_output_tokens_per_s:.2f}")
    line("Peak concurrent requests:", f"{found.max_concurrent_requests:.2f}")
    line("Total token throughput (tok/s):", f"{found.total_token_throughput:.2f}")
    if found.max_lateness_ms > 0:
        line("Maximum sending delay (ms):", f"{found.max_lateness_ms:.2f}")
    for title, name, summary in (
        ("Time to First Token", "TTFT", found.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", found.tpot),
        ("Inter-token Latency", "ITL", found.itl),
        ("End-to-end Latency", "E2EL", found.e2el),
    ):
        if math.isnan(summary.mean):
            continue  # no values
        lines.append(f"{title:-^{_WIDTH}}")
        for kind, value in (("Mean", summary.mean), ("Median", summary.median), ("P99", summary.p99)):
            line(f"{kind} {name} (ms):", f"{value:.2f}")
    return "\n".join([*lines, "=" * _WIDTH])
