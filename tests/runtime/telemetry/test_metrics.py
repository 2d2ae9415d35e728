import dataclasses

from prometheus_client import REGISTRY
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.request import FinishReason, Load, Output
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.telemetry.metrics import METHODS, OUTCOMES, REFUSAL_CODES, Metrics, ServerState
from meshserve.runtime.telemetry.request_log import Observer

RECORD = StepRecord(
    num_running=2, max_running=8, num_waiting=0, num_pages=10, num_free_pages=5, num_evictable_pages=1, num_decodes=2,
    num_prefills=1, num_prefill_tokens=8, num_decode_tokens=2, num_padding_tokens=6, num_steps=1,
    queue_seconds=(0.1, 0.2), num_admitted_tokens=40, num_cached_tokens=32, num_preempted=1, host_seconds=0.0002,
    step_seconds=0.004,
)  # fmt: skip
INFO = ModelInfo(
    name='a "toy"', architecture="Qwen3ForCausalLM", vocab_size=8, max_context_tokens=8, eos_token_ids=(), tp_size=1,
    dtype="float32", page_size_tokens=16, num_parameters=1, num_devices=1, device_kind="cpu", server_version="0",
)  # fmt: skip


def samples(metrics: Metrics) -> dict[tuple[str, frozenset], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def test_steps_add_up():
    metrics = Metrics()
    metrics.read_late_compiles = lambda: 2
    for _ in range(3):
        metrics.record_step(RECORD)
    value = metrics.registry.get_sample_value
    assert value("meshserve_steps_total") == 3
    assert value("meshserve_prefill_tokens_total") == 24 and value("meshserve_padding_tokens_total") == 18
    assert value("meshserve_cached_tokens_total") == 96 and value("meshserve_preemptions_total") == 3
    assert value("meshserve_queue_seconds_count") == 6
    assert value("meshserve_step_seconds_bucket", {"le": "0.005"}) == 3
    assert value("meshserve_batch_occupancy_ratio_bucket", {"le": "0.3"}) == 3
    assert value("meshserve_compiles_after_ready_total") == 2


def test_draft_tokens_are_counted_by_their_place():
    metrics = Metrics()
    for _ in range(2):
        counts = {"num_drafts_at": (3, 2, 1), "num_accepted_at": (2, 1, 0), "saved_seconds": -0.25}
        metrics.record_step(dataclasses.replace(RECORD, **counts))
    value = metrics.registry.get_sample_value
    labels = [(place, outcome) for place in "123" for outcome in ("accepted", "rejected")]
    name = "meshserve_verified_draft_tokens_total"
    assert [value(name, {"place": place, "outcome": outcome}) for place, outcome in labels] == [4, 2, 2, 2, None, 2]
    assert value("meshserve_draft_saved_seconds") == -0.5


def test_every_counter_and_histogram_exists_at_zero_before_the_first_event():
    """Otherwise `increase()` does not see the first event of a series."""
    metrics = Metrics()
    before = samples(metrics)
    names = {name for name, _ in before}
    assert {name for name in names if name.endswith(("_total", "_bucket", "_count", "_sum"))} >= {
        "meshserve_requests_total", "meshserve_refused_calls_total", "meshserve_messages_total",
        "meshserve_output_tokens_total", "meshserve_inter_token_seconds_bucket", "meshserve_queue_seconds_bucket",
        "meshserve_expired_requests_total", "meshserve_compiles_after_ready_total",
    }  # fmt: skip
    assert all(value == 0 for (name, _), value in before.items() if name != "meshserve_uptime_seconds")
    metrics.record_step(RECORD)
    for code in REFUSAL_CODES:
        metrics.count_refusal(code)
    for method in METHODS:
        for outcome in OUTCOMES:
            request_log = Observer(metrics).begin(
                method=method, request_id="r", tenant="", num_prompt_tokens=1, metadata={}, began=0.0
            )
            for _ in range(2):
                request_log.sent(Output(request_id="r", token_ids=(1,)))
            request_log.end(outcome)
    after = samples(metrics)
    assert after.keys() == before.keys()
    assert after["meshserve_requests_total", frozenset({("method", "Chat"), ("outcome", "stop")})] == 1
    assert {reason.value for reason in FinishReason} <= set(OUTCOMES)


def test_tokens_that_arrive_together_are_as_many_equal_intervals():
    metrics = Metrics()
    metrics.stream.observe_intervals(0.008, 4)
    metrics.stream.observe_intervals(0.001, 1)  # a bound belongs to its bucket
    metrics.stream.observe_intervals(9.0, 1)
    value = metrics.registry.get_sample_value
    cumulative = [value("meshserve_inter_token_seconds_bucket", {"le": le}) for le in ("0.001", "0.002", "3.0", "+Inf")]
    assert cumulative == [1, 5, 5, 6]
    assert value("meshserve_inter_token_seconds_count") == 6 and value("meshserve_inter_token_seconds_sum") == 9.009


def test_two_servers_of_a_process_share_no_metrics():
    first, second = Metrics(), Metrics()
    first.count_refusal("unauthenticated")
    assert first.registry.get_sample_value("meshserve_refused_calls_total", {"code": "unauthenticated"}) == 1
    assert second.registry.get_sample_value("meshserve_refused_calls_total", {"code": "unauthenticated"}) == 0
    assert not any(family.name.startswith("meshserve") for family in REGISTRY.collect())


def test_openmetrics_parses_with_all_samples():
    metrics = Metrics()
    load = Load(num_running=1, num_waiting=2, num_pages=4, num_free_pages=1)
    metrics.read_state = lambda: ServerState(info=INFO, load=load, num_open=3, is_ready=True)
    metrics.record_step(RECORD)
    families = list(text_string_to_metric_families(openmetrics(metrics.registry, escaping=ALLOWUTF8).decode()))
    assert all(family.documentation for family in families)
    found = {sample.name: sample for family in families for sample in family.samples}
    assert found["meshserve_info"].labels["model"] == 'a "toy"' and found["meshserve_open_requests"].value == 3
    assert found["vllm:kv_cache_usage_perc"].value == 0.75
    assert found["vllm:cache_config_info"].labels["num_gpu_blocks"] == "4"
    assert not [name for name in found if name.endswith("_created")]
