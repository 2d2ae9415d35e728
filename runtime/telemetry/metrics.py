"""What the server counts, and how Prometheus reads it. In: journeys of requests, records of steps. Out: text.

Names begin with `meshserve_` and carry base units. Three gauges and one info metric stand there a second time under the
names that Kubernetes inference gateways look for (`vllm:*`), so these work untouched.

Written by the event loop's thread and, for steps, by the engine's; each number has one writer. Reading while they write
may miss the last event, and no more. An observation costs one bisection: at 50,000 messages a second that matters.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..api.engine_api import ModelInfo
from ..api.request import Load

if TYPE_CHECKING:
    from ..engine.step_record import StepRecord

_LATENCY_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_GAP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0, 3.0)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_SHARES = tuple(tenth / 10 for tenth in range(1, 11))


class Histogram:
    """Counts of observations at or below each bound."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """All numbers of one server."""

    def __init__(self) -> None:
        self.time_to_first_token_seconds = Histogram(_LATENCY_SECONDS)
        self.inter_token_seconds = Histogram(_GAP_SECONDS)
        self.request_seconds = Histogram(_LATENCY_SECONDS)
        self.loop_lag_seconds = Histogram(_GAP_SECONDS)
        self.num_requests: Counter[tuple[str, str]] = Counter()  # by method and outcome
        self.num_refused_calls: Counter[str] = Counter()  # by status code
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_messages = 0
        # Of the engine's steps.
        self.queue_seconds = Histogram(_LATENCY_SECONDS)
        self.step_seconds = Histogram(_STEP_SECONDS)
        self.batch_occupancy = Histogram(_SHARES)
        self.host_seconds = Histogram(_STEP_SECONDS)
        self.num_late_compiles: Callable[[], int] = lambda: 0  # of `compiles.CompileWatch`
        self._step_counts: Counter[str] = Counter()
        self._started = time.monotonic()

    def record_step(self, record: "StepRecord") -> None:
        """Takes one dispatch, on the engine's thread."""
        self.step_seconds.observe(record.step_seconds)
        self.host_seconds.observe(record.host_seconds)
        self.batch_occupancy.observe(record.occupancy)
        for seconds in record.queue_seconds:
            self.queue_seconds.observe(seconds)
        for name in _STEP_COUNTERS:
            self._step_counts[name] += getattr(record, name)

    def exposition(self, *, info: ModelInfo | None, load: Load | None, num_open: int, is_ready: bool) -> str:
        """Everything in Prometheus's text format, version 0.0.4."""
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: Iterable[str]) -> None:
            lines.extend(family_lines(name, kind, text, samples))

        for name, kind, text, value in self._values(load, num_open, is_ready):
            family(name, kind, text, [f"{name} {value}"])
        for name, text, histogram in self._histograms():
            family(name, "histogram", text, histogram.lines(name))
        requests = sorted(self.num_requests.items())
        name = "meshserve_requests_total"
        family(name, "counter", "Requests that have ended, by how.", (
            f"{name}{labels(method=method, outcome=outcome)} {count}" for (method, outcome), count in requests
        ))  # fmt: skip
        name = "meshserve_refused_calls_total"
        family(name, "counter", "Calls refused before they had a place in the queue, by status.", (
            f"{name}{labels(code=code)} {count}" for code, count in sorted(self.num_refused_calls.items())
        ))  # fmt: skip
        if info is not None:
            name = "meshserve_info"
            what = labels(model=info.name, version=info.server_version, device=info.device_kind, dtype=info.dtype)
            family(name, "gauge", "What is served; always 1.", [f"{name}{what} 1"])
            if load is not None:
                for name, kind, text, sample in _aliases(info, load):
                    family(name, kind, text, [sample])
        return "\n".join(lines) + "\n"

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        yield (
            "meshserve_time_to_first_token_seconds",
            "From the call to its first token.",
            self.time_to_first_token_seconds,
        )
        yield (
            "meshserve_inter_token_seconds",
            "Between tokens of a request, as sent.",
            self.inter_token_seconds,
        )
        yield "meshserve_request_seconds", "From the call to its last message.", self.request_seconds
        yield "meshserve_queue_seconds", "From the queue to the first step.", self.queue_seconds
        yield "meshserve_step_seconds", "From a dispatch until its tokens are there.", self.step_seconds
        yield "meshserve_step_host_seconds", "Planning and building a batch.", self.host_seconds
        yield "meshserve_batch_occupancy_ratio", "Requests of a step, of the most it may have.", self.batch_occupancy
        yield "meshserve_event_loop_lag_seconds", "How late the event loop wakes up.", self.loop_lag_seconds

    def _values(self, load: Load | None, num_open: int, is_ready: bool) -> Iterator[tuple[str, str, str, float]]:
        """Name, type, help and value of what has no labels."""
        yield "meshserve_ready", "gauge", "1 while requests are taken.", int(is_ready)
        yield "meshserve_uptime_seconds", "gauge", "Since the server began.", time.monotonic() - self._started
        yield "meshserve_open_requests", "gauge", "Requests whose streams are open.", num_open
        yield "meshserve_prompt_tokens_total", "counter", "Tokens of accepted prompts.", self.num_prompt_tokens
        yield "meshserve_output_tokens_total", "counter", "Tokens sent.", self.num_output_tokens
        yield "meshserve_messages_total", "counter", "Messages that carried tokens or text.", self.num_messages
        if load is not None:
            yield "meshserve_running_requests", "gauge", "Requests that take part in steps.", load.num_running
            yield "meshserve_waiting_requests", "gauge", "Requests in the queue.", load.num_waiting
            yield "meshserve_kv_pages", "gauge", "Pages of the KV cache of each device.", load.num_pages
            yield "meshserve_kv_free_pages", "gauge", "Pages that a new request could take.", load.num_free_pages
        if self._step_counts:
            yield "meshserve_compiles_after_ready_total", "counter", "A fault, each of them.", self.num_late_compiles()
            for field, (name, text) in _STEP_COUNTERS.items():
                yield name, "counter", text, self._step_counts[field]


# Fields of StepRecord that add up.
_STEP_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_steps": ("meshserve_steps_total", "Steps of the engine; a dispatch may hold several."),
    "num_prefill_tokens": ("meshserve_prefill_tokens_total", "Tokens of prompts computed by steps."),
    "num_decode_tokens": ("meshserve_decode_tokens_total", "Tokens sampled by decode steps, behind drafts, too."),
    "num_draft_tokens": ("meshserve_draft_tokens_total", "Tokens guessed by prompt lookup."),
    "num_accepted_tokens": ("meshserve_accepted_draft_tokens_total", "Those of them that held."),
    "num_padding_tokens": ("meshserve_padding_tokens_total", "Places of compiled shapes that were left empty."),
    "num_admitted_tokens": ("meshserve_admitted_tokens_total", "Known tokens of requests that began to run."),
    "num_cached_tokens": ("meshserve_cached_tokens_total", "Those of them that the cache already had."),
    "num_preempted": ("meshserve_preemptions_total", "Times a running request gave way."),
    "num_evicted_pages": ("meshserve_evicted_pages_total", "Kept pages that were given to others."),
    "num_wasted_tokens": ("meshserve_wasted_tokens_total", "Tokens sampled for requests that had ended."),
    "num_refused": ("meshserve_refused_requests_total", "Requests for which the queue had no room."),
    "num_expired": ("meshserve_expired_requests_total", "Requests whose deadline passed."),
}


def _aliases(info: ModelInfo, load: Load) -> Iterator[tuple[str, str, str, str]]:
    model = labels(model_name=info.name)
    usage = 1.0 - load.num_free_pages / load.num_pages if load.num_pages else 0.0
    for name, text, value in (
        ("vllm:num_requests_running", "As meshserve_running_requests.", load.num_running),
        ("vllm:num_requests_waiting", "As meshserve_waiting_requests.", load.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", usage),
    ):
        yield name, "gauge", text, f"{name}{model} {value}"
    name = "vllm:cache_config_info"
    cache = labels(model_name=info.name, block_size=str(info.page_size_tokens), num_gpu_blocks=str(load.num_pages))
    yield name, "gauge", "Size of the KV cache; always 1.", f"{name}{cache} 1"


def family_lines(name: str, kind: str, text: str, samples: Iterable[str]) -> Iterator[str]:
    """What Prometheus reads of one metric: help, type, and its samples."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield from samples


def labels(**values: str) -> str:
    """The labels of a sample, escaped."""

    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in values.items()) + "}"
