import pytest

from meshserve.runtime.api.request import Output
from meshserve.runtime.telemetry.request_log import Observer

pytest.importorskip("opentelemetry.sdk", reason="needs the extra tracing")


def test_a_request_is_a_span_under_its_callers():
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from meshserve.runtime.telemetry.tracing import Tracer

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observer = Observer(tracer=Tracer(provider))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for outcome in ("stop", "unavailable"):
        request_log = observer.begin(
            method="Generate",
            request_id="r",
            tenant="t",
            num_prompt_tokens=3,
            metadata={"traceparent": parent},
            began=0.0,
        )
        request_log.sent(Output(request_id="r", token_ids=(1, 2)))
        request_log.end(outcome)
    spans = exporter.get_finished_spans()
    assert [span.status.is_ok for span in spans] == [True, False]
    assert [f"{span.context.trace_id:032x}" for span in spans] == [parent.split("-")[1]] * 2
    assert spans[0].parent is not None and f"{spans[0].parent.span_id:016x}" == parent.split("-")[2]
    assert [event.name for event in spans[0].events] == ["first_token", "last_token"]
    assert spans[0].start_time <= spans[0].events[0].timestamp <= spans[0].end_time + 10**6
    attributes = spans[0].attributes or {}
    assert (attributes["meshserve.outcome"], attributes["meshserve.num_output_tokens"]) == ("stop", 2)
