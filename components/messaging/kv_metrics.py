"""Prometheus metrics of a router's view of caches."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from components.messaging.kv_subscriber import KvMirror
from components.routing.kv_index import KvIndex


class KvMirrorMetrics(Collector):
    def __init__(self, index: KvIndex, mirror: KvMirror) -> None:
        self._index = index
        self._mirror = mirror

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        index, counts = self._index, self._mirror.counts
        gauges = {
            "kv_index_blocks": ("Blocks in the index, of all instances.", index.num_blocks),
            "kv_index_max_blocks": ("As many as it may hold.", index.max_blocks),
            "kv_index_missing_blocks": ("Not in it for want of room, at most.", self._mirror.missing),
        }
        counters = {
            "kv_index_refused_blocks": ("Refused for want of room.", index.refused),
            "kv_mirror_batches": ("Batches of KV events that came.", counts.batches),
            "kv_mirror_gaps": ("Gaps seen in their numbers.", counts.gaps),
            "kv_mirror_dumps": ("Dumps taken in.", counts.dumps),
            "kv_mirror_failed_dumps": ("Dumps that failed.", counts.failed_dumps),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value=value)
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(name, about, value=value)
