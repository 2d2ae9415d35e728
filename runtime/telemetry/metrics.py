"""Prometheus metrics of a server, in a registry of its own. In: finished requests, step records. Out: samples.

Names begin with `meshserve_` and use base units. Three gauges and one info metric also exist under the names that
Kubernetes inference gateways read (`vllm:*`). Counters and histograms exist at 0 from the start, for each label value
that can occur, so that `increase()` sees the first event.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..api.engine_api import ModelInfo
from ..api.request import FinishReason, Load
from ..host_cache.counts import HostCacheCounts
from ..program.expert_balance import ExpertBalance
from .adapter_metrics import AdapterMetrics
from .expert_metrics import expert_metrics
from .logs import num_dropped_lines

if TYPE_CHECKING:
    from ..engine.step_record import StepRecord

_LATENCY_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_GAP_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0, 3.0)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_SHARES = tuple(tenth / 10 for tenth in range(1, 11))

# Label values that are exported at 0 from the start.
METHODS = ("Generate", "Chat", "Embed", "Score", "Rerank", "VllmEngine.Generate", "VllmEngine.Embed")
OUTCOMES = (*(reason.value for reason in FinishReason), "internal", "resource_exhausted", "unavailable")
REFUSAL_CODES = ("internal", "permission_denied", "resource_exhausted", "unauthenticated", "unavailable")

# Counters of steps, by the field of StepRecord that they add up.
_STEP_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_steps": ("meshserve_steps_total", "Engine steps; with multi-step decode a dispatch holds several."),
    "num_prefill_tokens": ("meshserve_prefill_tokens_total", "Prompt tokens computed by prefill."),
    "num_decode_tokens": (
        "meshserve_decode_tokens_total",
        "Tokens sampled by decode steps, accepted draft tokens included.",
    ),
    "num_draft_tokens": ("meshserve_draft_tokens_total", "Draft tokens proposed."),
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
    "num_not_finite": (
        "meshserve_not_finite_requests_total",
        "Requests that ended because the model computed logits that are NaN or infinite.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """State of a server at the time of a scrape. `info` and `load` are None until the engine exists."""

    info: ModelInfo | None = None
    load: Load | None = None
    num_open: int = 0
    is_ready: bool = False


class Metrics:
    """The metrics of one server.

    Metrics of requests are written by the event loop's thread, those of steps by the engine's, and any thread may read.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # in the text format each would be a gauge `..._created` of its own
        self.registry = CollectorRegistry(auto_describe=True)
        self.read_state: Callable[[], ServerState] = ServerState  # replaced by the server
        self.read_late_compiles: Callable[[], int] = lambda: 0  # replaced once `compile_cache.CompileWatch` counts
        # Lost workers, and refused constraints by limit; replaced by the server with `grammar.Grammars.counts`.
        self.read_constraint_counts: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {})
        self.read_host_cache: Callable[[], HostCacheCounts | None] = lambda: None  # replaced by a server with a tier
        self.read_task_failures: Callable[[], Mapping[str, int]] = dict  # replaced with `Supervisor.num_failures`
        self.read_expert_balance: Callable[[], ExpertBalance | None] = lambda: None  # replaced by the server
        self.stream = StreamCounts()
        self.adapters = AdapterMetrics()
        self._add_request_metrics()
        self._add_step_metrics()
        started = time.monotonic()
        uptime = Gauge("meshserve_uptime_seconds", "Time since the server started, in seconds.", registry=self.registry)
        uptime.set_function(lambda: time.monotonic() - started)
        self.registry.register(self.stream)
        self.registry.register(self.adapters)
        self.registry.register(_StateCollector(self))

    def _add_request_metrics(self) -> None:
        self.time_to_first_token_seconds = self._histogram(
            "meshserve_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token, in seconds.",
            _LATENCY_SECONDS,
        )
        self.request_seconds = self._histogram(
            "meshserve_request_seconds",
            "Time from the arrival of a request to its last message, in seconds.",
            _LATENCY_SECONDS,
        )
        self.loop_lag_seconds = self._histogram(
            "meshserve_event_loop_lag_seconds", "Delay of the event loop beyond its timers, in seconds.", _GAP_SECONDS
        )
        self.num_prompt_tokens = self._counter("meshserve_prompt_tokens_total", "Prompt tokens of accepted requests.")
        self.num_pooled = self._counter(
            "meshserve_pooled_texts_total", "Texts that were embedded, and documents that were scored."
        )
        self.num_closed_connections = self._counter(
            "meshserve_closed_connections_total",
            "gRPC connections that were closed because calls on them were reset before their message came.",
        )
        self._requests = Counter(
            "meshserve_requests_total",
            "Requests that have ended, by method and outcome.",
            ("method", "outcome"),
            registry=self.registry,
        )
        self._refused_calls = Counter(
            "meshserve_refused_calls_total",
            "Calls that were refused before they entered the queue, by gRPC status.",
            ("code",),
            registry=self.registry,
        )
        self._refused = {code: self._refused_calls.labels(code) for code in REFUSAL_CODES}
        self._ended = {
            (method, outcome): self._requests.labels(method, outcome) for method in METHODS for outcome in OUTCOMES
        }

    def _add_step_metrics(self) -> None:
        self._queue_seconds = self._histogram(
            "meshserve_queue_seconds",
            "Time a request waits in the queue before its first step, in seconds.",
            _LATENCY_SECONDS,
        )
        self._step_seconds = self._histogram(
            "meshserve_step_seconds",
            "Time from the dispatch of a step until its tokens are available, in seconds.",
            _STEP_SECONDS,
        )
        self._host_seconds = self._histogram(
            "meshserve_step_host_seconds", "Host time to plan a step and build its batch, in seconds.", _STEP_SECONDS
        )
        self._batch_occupancy = self._histogram(
            "meshserve_batch_occupancy_ratio", "Running requests as a share of max_running, per step.", _SHARES
        )
        self._step_counters = {field: self._counter(name, text) for field, (name, text) in _STEP_COUNTERS.items()}
        self._verified_drafts = Counter(
            "meshserve_verified_draft_tokens_total",
            "Draft tokens that were verified, by their place after the last token (from 1) and by outcome.",
            ["place", "outcome"],
            registry=self.registry,
        )
        for outcome in ("accepted", "rejected"):
            self._verified_drafts.labels("1", outcome)
        self._saved_seconds = Gauge(
            "meshserve_draft_saved_seconds",
            "Estimated seconds that draft tokens have saved since the start; negative if they cost more.",
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=bounds, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def record_step(self, record: "StepRecord") -> None:
        """Adds one dispatch. Called on the engine's thread."""
        self._step_seconds.observe(record.step_seconds)
        self._host_seconds.observe(record.host_seconds)
        self._batch_occupancy.observe(record.occupancy)
        for seconds in record.queue_seconds:
            self._queue_seconds.observe(seconds)
        for field, counter in self._step_counters.items():
            if amount := getattr(record, field):
                counter.inc(amount)
        self._saved_seconds.inc(record.saved_seconds)
        for place, (num_drafts, num_accepted) in enumerate(
            zip(record.num_drafts_at, record.num_accepted_at, strict=True), start=1
        ):
            for outcome, count in (("accepted", num_accepted), ("rejected", num_drafts - num_accepted)):
                if count:
                    self._verified_drafts.labels(str(place), outcome).inc(count)

    def count_request(self, method: str, outcome: str) -> None:
        """Counts a request that has ended."""
        (self._ended.get((method, outcome)) or self._requests.labels(method, outcome)).inc()

    def count_refusal(self, code: str) -> None:
        """Counts a call that was refused with the gRPC status `code`, in lower case."""
        (self._refused.get(code) or self._refused_calls.labels(code)).inc()


class StreamCounts(Collector):
    """Counts the messages and tokens of all streams, on the event loop's thread.

    These are plain numbers and not a Counter and a Histogram, because they change with each message: those take a lock
    for each change (1.1 us a message instead of 0.3 us), and a Histogram takes one observation at a time, while a
    message brings as many equal intervals as it has tokens. A concurrent scrape may miss the latest message.
    """

    def __init__(self) -> None:
        self.num_messages = 0
        self.num_tokens = 0
        self._num_intervals = [0] * (len(_GAP_SECONDS) + 1)  # by bucket
        self._interval_seconds = 0.0

    def observe_intervals(self, seconds: float, num_tokens: int) -> None:
        """Adds the intervals before `num_tokens` tokens that arrived together, `seconds` after those before them."""
        self._num_intervals[bisect_left(_GAP_SECONDS, seconds / num_tokens)] += num_tokens
        self._interval_seconds += seconds

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "meshserve_messages_total", "Stream messages that carried tokens or text.", value=self.num_messages
        )
        yield CounterMetricFamily(
            "meshserve_output_tokens_total", "Output tokens sent to callers.", value=self.num_tokens
        )
        total, buckets = 0, []
        for bound, count in zip((*map(str, _GAP_SECONDS), "+Inf"), self._num_intervals, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            "meshserve_inter_token_seconds",
            "Time between consecutive tokens of a request as they are sent, in seconds.",
            buckets=buckets,
            sum_value=self._interval_seconds,
        )


class _StateCollector(Collector):
    """Reads the state of the server at each scrape. Metrics of the engine have no samples until there is one."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        state = self._metrics.read_state()
        yield GaugeMetricFamily(
            "meshserve_ready", "Whether the server accepts requests: 1 or 0.", value=int(state.is_ready)
        )
        yield GaugeMetricFamily("meshserve_open_requests", "Requests with an open stream.", value=state.num_open)
        yield late_compiles(self._metrics.read_late_compiles())
        yield CounterMetricFamily(
            "meshserve_dropped_log_lines_total",
            "Lines of the log that were dropped because stderr was not read.",
            value=num_dropped_lines(),
        )
        yield task_failures(self._metrics.read_task_failures())
        yield from _constraint_metrics(*self._metrics.read_constraint_counts())
        if (counts := self._metrics.read_host_cache()) is not None:
            yield from _host_cache_metrics(counts)
        if (balance := self._metrics.read_expert_balance()) is not None:
            yield from expert_metrics(balance)
        if (load := state.load) is None:
            return
        for name, text, value in (
            ("meshserve_running_requests", "Requests that are running.", load.num_running),
            ("meshserve_waiting_requests", "Requests that wait in the queue.", load.num_waiting),
            ("meshserve_kv_pages", "KV cache pages on each device.", load.num_pages),
            ("meshserve_kv_free_pages", "KV cache pages that are free or evictable.", load.num_free_pages),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        if state.info is not None:
            yield _server_info(state.info)
            yield from _gateway_metrics(state.info, load)


def late_compiles(count: int) -> Metric:
    """Returns the counter of programs that were compiled too late."""
    return CounterMetricFamily(
        "meshserve_compiles_after_ready_total",
        "Programs compiled after the server was ready; each one is a bug that stalls all requests.",
        value=count,
    )


def task_failures(counts: Mapping[str, int]) -> Metric:
    """Returns the counter of failures of background tasks."""
    failures = CounterMetricFamily(
        "meshserve_background_task_failures_total",
        "Failures of background tasks, by task; a task that can be run again is.",
        labels=["task"],
    )
    for task, count in counts.items():
        failures.add_metric([task], count)
    return failures


def _constraint_metrics(num_lost_workers: int, num_refused: Mapping[str, int]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "meshserve_constraint_workers_lost_total",
        "Processes for constraints that crashed, or were ended because of a limit.",
        value=num_lost_workers,
    )
    refused = CounterMetricFamily(
        "meshserve_constraints_refused_total", "Constraints refused because of a limit, by limit.", labels=["limit"]
    )
    for limit, count in num_refused.items():
        refused.add_metric([limit], count)
    yield refused


def _host_cache_metrics(counts: HostCacheCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("meshserve_host_cache_pages", "KV cache pages in host memory.", value=counts.num_pages)
    for name, text, value in (
        ("saved_pages", "Cached KV pages that were copied to host memory.", counts.num_saved),
        ("restored_pages", "KV pages that were copied from host memory to the devices.", counts.num_restored),
        ("resumed_pages", "KV pages that were copied back for requests that had been preempted.", counts.num_resumed),
        ("loaded_pages", "KV pages that were read from the files of the server's last run.", counts.num_loaded),
        ("lost_pages", "Cached KV pages that were evicted without a copy in host memory.", counts.num_lost),
        (
            "recomputed_pages",
            "KV pages in host memory whose tokens were computed instead, because that was faster.",
            counts.num_recomputed,
        ),
        ("failed_copies", "Copies of blocks of KV pages, to or from host memory, that failed.", counts.num_failed),
    ):
        yield CounterMetricFamily(f"meshserve_host_cache_{name}_total", text, value=value)


def _server_info(info: ModelInfo) -> Metric:
    labels = {
        "model": info.name, "version": info.server_version, "device": info.device_kind, "dtype": info.dtype
    }  # fmt: skip
    return InfoMetricFamily("meshserve", "The model and the server; the value is always 1.", value=labels)


def _gateway_metrics(info: ModelInfo, load: Load) -> Iterator[Metric]:
    """Yields the metrics under the names that Kubernetes inference gateways read."""
    usage = 1.0 - load.num_free_pages / load.num_pages if load.num_pages else 0.0
    for name, text, value in (
        ("vllm:num_requests_running", "Requests that are running.", load.num_running),
        ("vllm:num_requests_waiting", "Requests that wait in the queue.", load.num_waiting),
        ("vllm:kv_cache_usage_perc", "KV cache usage, from 0 to 1.", usage),
    ):
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((info.name,), value)
        yield family
    cache = {
        "model_name": info.name, "block_size": str(info.page_size_tokens), "num_gpu_blocks": str(load.num_pages)
    }  # fmt: skip
    yield InfoMetricFamily("vllm:cache_config", "Configuration of the KV cache; the value is always 1.", value=cache)
