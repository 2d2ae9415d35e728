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
        family(name, "counter", "Requests that have ended, by method and outcome.", (
            f"{name}{labels(method=method, outcome=outcome)} {count}" for (method, outcome), count in requests
        ))  # fmt: skip
        name = "meshserve_refused_calls_total"
        family(name, "counter", "Calls that were refused before they entered the queue, by gRPC status.", (
            f"{name}{labels(code=code)} {count}" for code, count in sorted(self.num_refused_calls.items())
        ))  # fmt: skip
        if info is not None:
            name = "meshserve_info"
            what = labels(model=info.name, version=info.server_version, device=info.device_kind, dtype=info.dtype)
            family(name, "gauge", "The model and the server; the value is always 1.", [f"{name}{what} 1"])
            if load is not None:
                for name, kind, text, sample in _aliases(info, load):
                    family(name, kind, text, [sample])
        return "\n".join(lines) + "\n"

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        yield (
            "meshserve_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token, in seconds.",
            self.time_to_first_token_seconds,
        )
        yield (
            "meshserve_inter_token_seconds",
            "Time between consecutive tokens of a request as they are sent, in seconds.",
            self.inter_token_seconds,
        )
        yield (
            "meshserve_request_seconds",
            "Time from the arrival of a request to its last message, in seconds.",
            self.request_seconds,
        )
        yield (
            "meshserve_queue_seconds",
            "Time a request waits in the queue before its first step, in seconds.",
            self.queue_seconds,
        )
        yield (
            "meshserve_step_seconds",
            "Time from the dispatch of a step until its tokens are available, in seconds.",
            self.step_seconds,
        )
        yield (
            "meshserve_step_host_seconds",
            "Host time to plan a step and build its batch, in seconds.",
            self.host_seconds,
        )
        yield (
            "meshserve_batch_occupancy_ratio",
            "Running requests as a share of max_running, per step.",
            self.batch_occupancy,
        )
        yield (
            "meshserve_event_loop_lag_seconds",
            "Delay of the event loop beyond its timers, in seconds.",
            self.loop_lag_seconds,
        )

    def _values(self, load: Load | None, num_open: int, is_ready: bool) -> Iterator[tuple[str, str, str, float]]:
        """Name, type, help and value of what has no labels."""
        yield "meshserve_ready", "gauge", "Whether the server accepts requests: 1 or 0.", int(is_ready)
        yield (
            "meshserve_uptime_seconds",
            "gauge",
            "Time since the server started, in seconds.",
            time.monotonic() - self._started,
        )
        yield "meshserve_open_requests", "gauge", "Requests with an open stream.", num_open
        yield "meshserve_prompt_tokens_total", "counter", "Prompt tokens of accepted requests.", self.num_prompt_tokens
        yield "meshserve_output_tokens_total", "counter", "Output tokens sent to callers.", self.num_output_tokens
        yield "meshserve_messages_total", "counter", "Stream messages that carried tokens or text.", self.num_messages
        if load is not None:
            yield "meshserve_running_requests", "gauge", "Requests that are running.", load.num_running
            yield "meshserve_waiting_requests", "gauge", "Requests that wait in the queue.", load.num_waiting
            yield "meshserve_kv_pages", "gauge", "KV cache pages on each device.", load.num_pages
            yield "meshserve_kv_free_pages", "gauge", "KV cache pages that are free or evictable.", load.num_free_pages
        if self._step_counts:
            yield (
                "meshserve_compiles_after_ready_total",
                "counter",
                "Programs compiled after the server was ready; each one is a bug that stalls all requests.",
                self.num_late_compiles(),
            )
            for field, (name, text) in _STEP_COUNTERS.items():
                yield name, "counter", text, self._step_counts[field]


# Fields of StepRecord that add up.
_STEP_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_steps": ("meshserve_steps_total", "Engine steps; with multi-step decode a dispatch holds several."),
    "num_prefill_tokens": ("meshserve_prefill_tokens_total", "Prompt tokens computed by prefill."),
    "num_decode_tokens": (
        "meshserve_decode_tokens_total",
        "Tokens sampled by decode steps, accepted draft tokens included.",
    ),
    "num_draft_tokens": ("meshserve_draft_tokens_total", "Draft tokens proposed by prompt lookup."),
    "num_accepted_tokens": ("meshserve_accepted_draft_tokens_total", "Draft tokens that were accepted."),
    "num_padding_tokens": (
        "meshserve_padding_tokens_total",
        "Padding tokens: places of compiled shapes that were left empty.",
    ),
    "num_admitted_tokens": (
        "meshserve_admitted_tokens_total",
        "Known tokens of requests when they were admitted to run.",
    ),
    "num_cached_tokens": (
        "meshserve_cached_tokens_total",
        "Tokens of admitted requests that were found in the prefix cache.",
    ),
    "num_preempted": ("meshserve_preemptions_total", "Preemptions of running requests."),
    "num_evicted_pages": ("meshserve_evicted_pages_total", "Cached KV pages that were evicted to make room."),
    "num_wasted_tokens": (
        "meshserve_wasted_tokens_total",
        "Tokens that were sampled for requests that had already ended.",
    ),
    "num_refused": ("meshserve_refused_requests_total", "Requests that were refused because the queue was full."),
    "num_expired": ("meshserve_expired_requests_total", "Requests that ended because their deadline passed."),
}


def _aliases(info: ModelInfo, load: Load) -> Iterator[tuple[str, str, str, str]]:
    model = labels(model_name=info.name)
    usage = 1.0 - load.num_free_pages / load.num_pages if load.num_pages else 0.0
    for name, text, value in (
        ("vllm:num_requests_running", "Requests that are running.", load.num_running),
        ("vllm:num_requests_waiting", "Requests that wait in the queue.", load.num_waiting),
        ("vllm:kv_cache_usage_perc", "KV cache usage, from 0 to 1.", usage),
    ):
        yield name, "gauge", text, f"{name}{model} {value}"
    name = "vllm:cache_config_info"
    cache = labels(model_name=info.name, block_size=str(info.page_size_tokens), num_gpu_blocks=str(load.num_pages))
    yield name, "gauge", "Configuration of the KV cache; the value is always 1.", f"{name}{cache} 1"


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
