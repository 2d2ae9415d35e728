"""`GET /status.json`: what `meshserve top` reads, and the last requests. In: metrics. Out: JSON for the page.

Figures are counters since the start, as in /metrics; the page computes rates and quantiles from two readings. A reading
is taken in another thread, because rendering metrics takes milliseconds and may wait for a step, and is shared by all
that ask within half a second.
"""

import asyncio
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

from meshserve.protos import inference_pb2 as pb

from ...api.engine_api import ModelInfo
from ...api.tenants import Permission, Tenant
from ...server.edge import Edge
from ...telemetry.request_log import FinishedRequest
from ..http_call import HttpCall

if TYPE_CHECKING:
    from aiohttp import web

_SHARED_SECONDS = 0.5
_REQUESTS = "meshserve_requests_total"
COUNTERS = frozenset(
    f"meshserve_{name}"
    for name in (
        "uptime_seconds", "output_tokens_total", "prompt_tokens_total", "steps_total", "preemptions_total",
        "cached_tokens_total", "admitted_tokens_total", "draft_tokens_total", "accepted_draft_tokens_total",
        "batch_occupancy_ratio_sum", "batch_occupancy_ratio_count", "adapters", "device_adapters",
    )
)  # fmt: skip
HISTOGRAMS = frozenset(
    f"meshserve_{name}_seconds"
    for name in ("time_to_first_token", "inter_token", "request", "queue", "step", "step_host")
)
_MODEL_FIELDS = (
    "name", "task", "supports_chat", "dtype", "quantization", "kv_cache_dtype", "num_devices", "device_kind", "tp_size",
    "max_context_tokens", "page_size_tokens", "server_version",
)  # fmt: skip


class ServerStatus:
    """The route of one edge."""

    def __init__(self, edge: Edge):
        self._edge = edge
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._read_at = -math.inf

    async def answer(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """Answers a request. See `openai_port`."""
        from aiohttp import web

        tenant = self._edge.access.tenant(call.invocation_metadata())
        is_old = time.monotonic() - self._read_at >= _SHARED_SECONDS
        if self._reading is None or (self._reading.done() and is_old):
            self._reading = asyncio.create_task(self._fresh())
        reading = await asyncio.shield(self._reading)  # a client that leaves does not end it for the others
        answer = {**reading, "requests": self._requests(tenant)}
        return web.json_response(answer, headers={"Cache-Control": "no-store"})

    async def _fresh(self) -> dict[str, Any]:
        reading = await asyncio.to_thread(self._read)
        self._read_at = time.monotonic()
        return reading

    def _read(self) -> dict[str, Any]:
        edge, backend = self._edge, self._edge.backend
        load = backend.engine.load() if backend is not None else None
        return {
            "seconds": time.monotonic(),
            "state": pb.ServerState.Name(edge.state).removeprefix("SERVER_STATE_"),
            "progress": edge.progress,
            "model": _shown_model(backend.info) if backend is not None else None,
            "load": dataclasses.asdict(load) if load is not None else None,
            **figures(edge.observer.metrics.registry.collect()),
        }

    def _requests(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Returns the last requests that a caller may see, the latest first: its own; an administrator sees all."""
        now, sees_all = time.monotonic(), Permission.ADMIN in tenant.permissions
        seen = [each for each in reversed(self._edge.observer.recent) if sees_all or each.tenant == tenant.name]
        return [_shown_request(each, now) for each in seen]


def figures(families: Iterable[Metric]) -> dict[str, Any]:
    """Returns the counters, outcomes and histograms of metrics.

    A histogram has its sum, its count, and pairs of a bound and the observations up to it; the last bound is None.
    """
    values: defaultdict[str, float] = defaultdict(float)
    outcomes: defaultdict[str, float] = defaultdict(float)
    histograms: defaultdict[str, dict[str, Any]] = defaultdict(lambda: {"buckets": []})
    for family in families:
        for sample in family.samples:
            kind = sample.name.removeprefix(f"{family.name}_")
            if family.name in HISTOGRAMS and kind == "bucket":
                bound = float(sample.labels["le"])
                histograms[family.name]["buckets"].append((None if math.isinf(bound) else bound, sample.value))
            elif family.name in HISTOGRAMS:
                histograms[family.name][kind] = sample.value
            elif sample.name in COUNTERS:
                values[sample.name] += sample.value
            elif sample.name == _REQUESTS and sample.value:
                outcomes[sample.labels["outcome"]] += sample.value
    return {"values": values, "outcomes": outcomes, "histograms": histograms}


def _shown_model(info: ModelInfo) -> dict[str, Any]:
    fields = {name: getattr(info, name) for name in _MODEL_FIELDS}
    return {**fields, "size": info.size, "default_sampling": dict(info.default_sampling)}


def _shown_request(request: FinishedRequest, now: float) -> dict[str, Any]:
    fields = dataclasses.asdict(request)
    return {**fields, "seconds_ago": round(now - fields.pop("ended"), 3)}
