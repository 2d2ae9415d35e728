"""Prometheus metrics of a mixture of experts. In: an `ExpertBalance`, read at each scrape. Out: samples."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..program.expert_balance import ExpertBalance


def expert_metrics(balance: ExpertBalance) -> Iterator[Metric]:
    """Yields the tokens of each expert and device, and how uneven they are."""
    for name, label, text, counts in (
        (
            "meshserve_expert_tokens_total",
            "expert",
            "Tokens that chose the expert, added up over all layers; each token chooses several experts in a layer.",
            balance.expert_tokens,
        ),
        (
            "meshserve_device_expert_tokens_total",
            "device",
            "Tokens that the device's experts had to compute, added up over all layers and experts.",
            balance.device_tokens,
        ),
    ):
        counter = CounterMetricFamily(name, text, labels=[label])
        for index, count in enumerate(counts.tolist()):
            counter.add_metric([str(index)], count)
        yield counter
    gauge = GaugeMetricFamily(
        "meshserve_expert_imbalance_ratio",
        "Tokens of the busiest expert or device of a layer over the mean, averaged over layers and the last one to two "
        "minutes; 1 is even, 0 means no tokens.",
        labels=["of"],
    )
    for of, ratio in (("experts", balance.expert_imbalance), ("devices", balance.device_imbalance)):
        gauge.add_metric([of], ratio)
    yield gauge
