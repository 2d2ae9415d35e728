"""One request as the edge sees it, from call to last message: counted, logged and traced when it ends.

The log line of a request, in JSON when the log is:

    {"request_id": "...", "tenant": "", "method": "Generate", "outcome": "length", "num_prompt_tokens": 12,
     "num_output_tokens": 64, "first_token_seconds": 0.021, "total_seconds": 0.412, ...}
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..api.request import Output
from .metrics import Metrics

_log = logging.getLogger("meshserve.request")


class RequestLog:
    """Made by `Observer.begin` when a request is accepted; `end` is called once."""

    __slots__ = ("fields", "first_token", "last_token", "num_output_tokens", "started", "_metrics", "_on_end")

    def __init__(
        self, metrics: Metrics, fields: dict[str, Any], on_end: "Callable[[RequestLog, str], None] | None", began: float
    ):
        self.fields = fields  # of the log line
        self.started = began
        self.first_token = 0.0
        self.last_token = 0.0
        self.num_output_tokens = 0
        self._metrics = metrics
        self._on_end = on_end
        metrics.num_prompt_tokens += fields["num_prompt_tokens"]

    def sent(self, output: Output) -> None:
        """A message is handed to the call."""
        metrics, num_tokens = self._metrics, len(output.token_ids)
        metrics.num_messages += 1
        if num_tokens == 0:
            return
        now = time.monotonic()
        if self.first_token == 0.0:
            self.first_token = now
            metrics.time_to_first_token_seconds.observe(now - self.started)
        else:
            metrics.inter_token_seconds.observe((now - self.last_token) / num_tokens, num_tokens)
        self.last_token = now
        self.num_output_tokens += num_tokens
        metrics.num_output_tokens += num_tokens

    def end(self, outcome: str) -> None:
        """Args:
        outcome: the finish reason, or the status code, in lower case."""
        seconds = time.monotonic() - self.started
        self._metrics.request_seconds.observe(seconds)
        self._metrics.num_requests[self.fields["method"], outcome] += 1
        if self._on_end is not None:
            self._on_end(self, outcome)
        if _log.isEnabledFor(logging.INFO):
            self.fields |= {
                "outcome": outcome,
                "num_output_tokens": self.num_output_tokens,
                "first_token_seconds": round(self.first_token - self.started, 6) if self.first_token else None,
                "total_seconds": round(seconds, 6),
            }
            _log.info("%s %s: %s", self.fields["method"], self.fields["request_id"], outcome, extra=self.fields)


class Observer:
    """Makes journeys. `tracer`, if there is one, gets each of them too (`tracing.Tracer`)."""

    def __init__(self, metrics: Metrics | None = None, tracer: Any = None):
        self.metrics = metrics if metrics is not None else Metrics()
        self._tracer = tracer

    def begin(
        self, *, method: str, request_id: str, tenant: str, num_prompt_tokens: int, metadata: Mapping[str, Any],
        began: float,
    ) -> RequestLog:  # fmt: skip
        """A request is submitted. `metadata` is that of the call: it may carry the caller's trace. `began`: when it was
        called, by the monotonic clock."""
        fields = {
            "request_id": request_id, "tenant": tenant, "method": method, "num_prompt_tokens": num_prompt_tokens
        }  # fmt: skip
        on_end = self._tracer.begin(fields, metadata) if self._tracer is not None else None
        return RequestLog(self.metrics, fields, on_end, began)

    def refuse(self, method: str, request_id: str, tenant: str, code: str) -> None:
        """A request that its tenant's quota has no room for is counted, and logged."""
        self.metrics.num_refused_calls[code] += 1
        fields = {"request_id": request_id, "tenant": tenant, "method": method, "outcome": code}
        _log.info("%s %s: refused, %s", method, request_id, code, extra=fields)
