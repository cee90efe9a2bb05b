"""Shows samples in Prometheus's text format, from a registry of the node's own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from epd.observe.families import FAMILIES, TIME_BUCKETS_S, Family, Histogram, Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Read = Callable[[], Iterable[Sample]]


class NodeCollector(Collector):
    """All families, each with the samples of now; a family without any has its name and help."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        shown = {name: _empty(family) for name, family in FAMILIES.items()}
        for sample in self._read():
            _add(shown[sample.family], sample)
        yield from shown.values()


def node_registry(read: Read) -> CollectorRegistry:
    """With the process's own metrics (start time, CPU, memory, descriptors); nothing global is touched."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(NodeCollector(read))
    return registry


def page(registry: CollectorRegistry) -> bytes:
    """What `/metrics` answers; of `CONTENT_TYPE`."""
    return generate_latest(registry)


def _empty(family: Family) -> Metric:
    if family.kind == "counter":
        return CounterMetricFamily(family.name, family.help, labels=family.labels)
    if family.kind == "gauge":
        return GaugeMetricFamily(family.name, family.help, labels=family.labels)
    return HistogramMetricFamily(family.name, family.help, labels=family.labels)


def _add(metric: Metric, sample: Sample) -> None:
    if isinstance(metric, HistogramMetricFamily):
        assert isinstance(sample.value, Histogram)
        buckets, count = [], 0
        for bound, n in zip((*map(str, TIME_BUCKETS_S), "+Inf"), list(sample.value.counts), strict=True):
            count += n
            buckets.append((bound, float(count)))
        metric.add_metric(sample.labels, buckets, sample.value.sum)
        return
    assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
    assert not isinstance(sample.value, Histogram)
    metric.add_metric(sample.labels, sample.value)
