"""Prometheus metrics of adapters (LoRA). In: finished requests, and the loaded adapters. Out: samples."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.adapters import AdapterInfo

MAX_LABELS = 64  # names of adapters with samples of their own
OTHER = "other"  # the label of all others


@dataclass
class _Counts:
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class AdapterMetrics(Collector):
    """Counts requests and tokens by adapter: of the first 64 names, and of all others together.

    A server may load thousands of adapters over time, and each label stays in the memory of whoever scrapes it. An
    adapter that is unloaded gives its label back; its counts end, as those of a process that ends.

    /metrics needs no token. Where tenants may not know of each other's adapters, no name is told: all are counted
    together, and endpoint pickers learn nothing.
    """

    def __init__(self) -> None:
        self.read_adapters: Callable[[], Sequence[AdapterInfo]] = tuple  # replaced by the server
        self.hides_names: Callable[[], bool] = lambda: False  # replaced by the server
        self.max_on_device = 0  # adapters that the devices hold at a time; set by the server
        self._open: Counter[str] = Counter()  # requests that have not ended
        self._counts: dict[str, _Counts] = {}
        self._lock = threading.Lock()  # requests end on the event loop; scrapes come on other threads

    def begin(self, name: str) -> None:
        """Notes that a request with an adapter has been accepted."""
        with self._lock:
            self._open[name] += 1

    def end(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Counts a request with an adapter that has ended."""
        with self._lock:
            self._open[name] -= 1
            if self._open[name] <= 0:
                del self._open[name]
            if name not in self._counts and len(self._counts) - (OTHER in self._counts) >= MAX_LABELS:
                name = OTHER
            counts = self._counts.setdefault(name, _Counts())
            counts.num_requests += 1
            counts.num_prompt_tokens += num_prompt_tokens
            counts.num_output_tokens += num_output_tokens

    def forget(self, name: str) -> None:
        """Gives back the label of an adapter that was unloaded."""
        with self._lock:
            if name != OTHER:
                self._counts.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        hides_names = self.hides_names()
        with self._lock:
            counts = {name: (each.num_requests, each.num_prompt_tokens, each.num_output_tokens)
                      for name, each in self._counts.items()}  # fmt: skip
        if hides_names and counts:
            requests, prompt_tokens, output_tokens = map(sum, zip(*counts.values(), strict=True))
            counts = {OTHER: (requests, prompt_tokens, output_tokens)}
        for index, (what, text) in enumerate(
            (
                ("requests", "Requests with an adapter that have ended"),
                ("prompt_tokens", "Prompt tokens of requests with an adapter that have ended"),
                ("output_tokens", "Output tokens of requests with an adapter that have ended"),
            )
        ):
            text = f"{text}, by adapter; those beyond {MAX_LABELS} names are counted as '{OTHER}'."
            counter = CounterMetricFamily(f"meshserve_adapter_{what}_total", text, labels=["adapter"])
            for name, values in counts.items():
                counter.add_metric([name], values[index])
            yield counter
        loaded = self.read_adapters()
        for name, text, value in (
            ("meshserve_adapters", "Adapters that requests may name.", len(loaded)),
            ("meshserve_device_adapters", "Adapters that are in the devices' memory.",
             sum(info.is_on_device for info in loaded)),
            ("meshserve_adapter_host_bytes", "Host memory that adapters take, in bytes.",
             sum(info.num_bytes for info in loaded)),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, text, value=value)
        if self.max_on_device and not hides_names:
            yield self._picked(loaded)

    def _picked(self, loaded: Sequence[AdapterInfo]) -> Metric:
        """Returns what endpoint pickers read, by vLLM's name, to send requests to where their adapter is."""
        with self._lock:
            asked = sorted(self._open)
        on_device = {info.name for info in loaded if info.is_on_device}
        running = [name for name in asked if name in on_device][:MAX_LABELS]
        waiting = [name for name in asked if name not in on_device][:MAX_LABELS]
        picked = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of open requests, on the devices and not; the value is the time of the scrape in Unix seconds.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        picked.add_metric([str(self.max_on_device), ",".join(running), ",".join(waiting)], time.time())
        return picked
