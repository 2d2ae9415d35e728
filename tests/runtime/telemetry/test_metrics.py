import json
import logging

from meshserve.runtime.api.request import Output
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.telemetry.logs import JsonFormatter
from meshserve.runtime.telemetry.metrics import Histogram, Metrics
from meshserve.runtime.telemetry.request_log import Observer


def test_a_histogram_counts_at_or_below_each_bound():
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, times)
    assert list(histogram.lines("h")) == [
        'h_bucket{le="1.0"} 3', 'h_bucket{le="2.0"} 4', 'h_bucket{le="+Inf"} 7', "h_sum 31.0", "h_count 7"
    ]  # fmt: skip


RECORD = StepRecord(
    num_running=2, max_running=8, num_waiting=0, num_pages=10, num_free_pages=5, num_evictable_pages=1, num_decodes=2,
    num_prefills=1, num_prefill_tokens=8, num_decode_tokens=2, num_padding_tokens=6, num_steps=1,
    queue_seconds=(0.1, 0.2), num_admitted_tokens=40, num_cached_tokens=32, num_preempted=1, host_seconds=0.0002,
    step_seconds=0.004,
)  # fmt: skip


def test_steps_add_up():
    metrics = Metrics()
    metrics.num_late_compiles = lambda: 2
    for _ in range(3):
        metrics.record_step(RECORD)
    text = metrics.exposition(info=None, load=None, num_open=0, is_ready=True)
    for line in (
        "meshserve_steps_total 3", "meshserve_prefill_tokens_total 24", "meshserve_padding_tokens_total 18",
        "meshserve_cached_tokens_total 96", "meshserve_preemptions_total 3", "meshserve_queue_seconds_count 6",
        'meshserve_step_seconds_bucket{le="0.005"} 3', 'meshserve_batch_occupancy_ratio_bucket{le="0.3"} 3',
        "meshserve_compiles_after_ready_total 2",
    ):  # fmt: skip
        assert line in text.splitlines(), line


def test_the_log_has_a_line_of_json_for_each_request(caplog):
    caplog.set_level(logging.INFO, "meshserve.request")
    request_log = Observer().begin(
        method="Chat", request_id="r\n1", tenant="t", num_prompt_tokens=3, metadata={}, began=0.0
    )
    request_log.sent(Output(request_id="r\n1", token_ids=(1, 2)))
    request_log.sent(Output(request_id="r\n1", text="held"))
    request_log.end("stop")
    text = JsonFormatter().format(caplog.records[-1])
    assert "\n" not in text
    line = json.loads(text)
    expected = {
        "level": "INFO", "logger": "meshserve.request", "request_id": "r\n1", "tenant": "t", "method": "Chat",
        "outcome": "stop", "num_prompt_tokens": 3, "num_output_tokens": 2,
    }  # fmt: skip
    assert expected.items() <= line.items()
    assert 0 <= line["first_token_seconds"] <= line["total_seconds"]
