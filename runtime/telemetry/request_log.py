"""The request log: counts, logs and traces each request from its acceptance to its last message.

A request's log line is one JSON object if the log is JSON:

    {"request_id": "...", "tenant": "", "method": "Generate", "adapter": "", "outcome": "length",
     "num_prompt_tokens": 12, "num_output_tokens": 64, "first_token_seconds": 0.021, "total_seconds": 0.412, ...}

and one compact line if it is text:

    Generate 3f2a... length: 12 prompt tokens, 64 output tokens, first token after 0.021 s, total 0.412 s
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.request import Output
from .metrics import Metrics

_NUM_RECENT = 100
_log = logging.getLogger("meshserve.request")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRequest:
    """What is known about a request that has ended. Holds nothing of its text."""

    request_id: str
    tenant: str
    method: str
    outcome: str
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_seconds: float | None
    total_seconds: float
    ended: float  # on the monotonic clock
    adapter: str = ""


class RequestLog:
    """The record of one accepted request. `Observer.begin` creates it; `end` is called exactly once."""

    __slots__ = (
        "fields",
        "first_token",
        "last_token",
        "num_output_tokens",
        "started",
        "_level",
        "_metrics",
        "_on_end",
        "_recent",
        "_stream",
    )

    def __init__(
        self,
        metrics: Metrics,
        fields: dict[str, Any],
        on_end: "Callable[[RequestLog, str], None] | None",
        began: float,
        recent: deque[FinishedRequest],
        level: int = logging.INFO,
    ):
        self.fields = fields  # the log line's
        self.started = began
        self.first_token = 0.0
        self.last_token = 0.0
        self.num_output_tokens = 0
        self._level = level
        self._metrics = metrics
        self._stream = metrics.stream
        self._on_end = on_end
        self._recent = recent
        metrics.num_prompt_tokens.inc(fields["num_prompt_tokens"])
        if fields["adapter"]:
            metrics.adapters.begin(fields["adapter"])

    def sent(self, output: Output) -> None:
        """Records a message that is about to be written to the stream."""
        stream, num_tokens = self._stream, len(output.token_ids)
        stream.num_messages += 1
        if num_tokens == 0:
            return
        now = time.monotonic()
        if self.first_token == 0.0:
            self.first_token = now
            self._metrics.time_to_first_token_seconds.observe(now - self.started)
        else:
            stream.observe_intervals(now - self.last_token, num_tokens)
        self.last_token = now
        self.num_output_tokens += num_tokens
        stream.num_tokens += num_tokens

    def end(self, outcome: str) -> None:
        """Records the end of the request.

        Args:
          outcome: The finish reason, or the gRPC status in lower case.
        """
        ended = time.monotonic()
        seconds = ended - self.started
        self._metrics.request_seconds.observe(seconds)
        self._metrics.count_request(self.fields["method"], outcome)
        if adapter := self.fields["adapter"]:
            self._metrics.adapters.end(adapter, self.fields["num_prompt_tokens"], self.num_output_tokens)
        if self._on_end is not None:
            self._on_end(self, outcome)
        results: dict[str, Any] = {
            "outcome": outcome,
            "num_output_tokens": self.num_output_tokens,
            "first_token_seconds": round(self.first_token - self.started, 6) if self.first_token else None,
            "total_seconds": round(seconds, 6),
        }
        self._recent.append(FinishedRequest(**self._identity(), **results, ended=ended))
        if _log.isEnabledFor(self._level):
            self.fields |= results
            _log.log(self._level, "%s", _summary(self.fields), extra=self.fields)

    def _identity(self) -> dict[str, Any]:
        """Returns the fields with which the request began. A tracer may have added others."""
        names = ("request_id", "tenant", "method", "num_prompt_tokens", "adapter")
        return {name: self.fields[name] for name in names}


def _summary(fields: Mapping[str, Any]) -> str:
    """Returns the line of a finished request in a text log."""
    first, tenant, adapter = fields["first_token_seconds"], fields["tenant"], fields["adapter"]
    return (
        f"{fields['method']} {fields['request_id']}{f' of {tenant}' if tenant else ''}"
        f"{f' with {adapter}' if adapter else ''} {fields['outcome']}: "
        f"{fields['num_prompt_tokens']} prompt tokens, {fields['num_output_tokens']} output tokens, "
        f"{f'first token after {first:.3f} s, ' if first is not None else ''}total {fields['total_seconds']:.3f} s"
    )


class Observer:
    """Creates the request log of each request. `tracer`, if given, records a span for each (`tracing.Tracer`).

    `level` is the level of the lines about finished requests.
    `recent` has the requests that ended last, the latest at its end. It belongs to the event loop's thread.
    """

    def __init__(self, metrics: Metrics | None = None, tracer: Any = None, level: int = logging.INFO):
        self.metrics = metrics if metrics is not None else Metrics()
        self._tracer, self._level = tracer, level
        self.recent: deque[FinishedRequest] = deque(maxlen=_NUM_RECENT)

    def begin(
        self, *, method: str, request_id: str, tenant: str, num_prompt_tokens: int, metadata: Mapping[str, Any],
        began: float, adapter: str = "",
    ) -> RequestLog:  # fmt: skip
        """Starts the record of a request that the engine has accepted.

        Args:
          metadata: Metadata of the call, which may carry the caller's trace.
          began: Time of the call on the monotonic clock.
          adapter: The name of its adapter; empty if it has none.
        """
        fields = {
            "request_id": request_id, "tenant": tenant, "method": method, "num_prompt_tokens": num_prompt_tokens,
            "adapter": adapter,
        }  # fmt: skip
        on_end = self._tracer.begin(fields, metadata) if self._tracer is not None else None
        return RequestLog(self.metrics, fields, on_end, began, self.recent, self._level)

    def refuse(self, method: str, request_id: str, tenant: str, code: str) -> None:
        """Counts and logs a request that exceeds its tenant's quota."""
        self.metrics.count_refusal(code)
        fields = {"request_id": request_id, "tenant": tenant, "method": method, "outcome": code}
        _log.info("%s %s of %s refused: %s", method, request_id, tenant or "an unnamed tenant", code, extra=fields)
