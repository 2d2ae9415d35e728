"""Exports an OpenTelemetry span for each request, as a child of the caller's if the call carries a `traceparent`.

Needs the extra `tracing`. The destination is set by OpenTelemetry's own configuration, for example
OTEL_EXPORTER_OTLP_ENDPOINT.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..api.errors import ConfigError
from .request_log import RequestLog

# Outcomes that do not mark the span as an error.
_FINE = frozenset(("stop", "length", "cancelled", "deadline"))


class Tracer:
    """Creates the spans of requests for `request_log.Observer`.

    Args:
      provider: An OpenTelemetry TracerProvider. None creates one that exports by OTLP over gRPC.

    Raises:
      ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, provider: Any = None):
        try:
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            provider = provider if provider is not None else _otlp_provider()
        except ImportError as error:
            raise ConfigError(f"--trace needs OpenTelemetry: {error}. Install meshserve[tracing].") from error
        self._provider = provider
        self._tracer = provider.get_tracer("meshserve")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)

    def begin(self, fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> Callable[[RequestLog, str], None]:
        """Starts the span of a request and returns the function that ends it."""
        context = self._propagator.extract(metadata)
        span = self._tracer.start_span(f"meshserve.{fields['method']}", context=context, kind=self._kind)
        for name, value in fields.items():
            span.set_attribute(f"meshserve.{name}", value)

        def end(request_log: RequestLog, outcome: str) -> None:
            # The first token ends queueing and prefill, the last one ends decoding.
            offset = time.time() - time.monotonic()
            if request_log.first_token:
                span.add_event("first_token", timestamp=round((request_log.first_token + offset) * 1e9))
                span.add_event("last_token", timestamp=round((request_log.last_token + offset) * 1e9))
            span.set_attribute("meshserve.outcome", outcome)
            span.set_attribute("meshserve.num_output_tokens", request_log.num_output_tokens)
            if outcome not in _FINE:
                span.set_status(self._error)
            span.end()

        return end

    def close(self) -> None:
        """Exports the remaining spans."""
        self._provider.shutdown()


def _otlp_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "meshserve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
