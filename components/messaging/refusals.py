"""Metric of messages that this process refused."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from components.errors import MeshError

# reasons beside the class names of errors
BAD_TRACEPARENT: Final = "BadTraceparent"  # the message is accepted and may begin a new trace
DUPLICATE: Final = "Duplicate"
GAP: Final = "Gap"
STRANGER: Final = "Stranger"  # the sender is not registered, has another epoch, or does not own the stream


class Refusals(Collector):
    """Labels are our own names, never content of a message."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, message: str, why: MeshError | str) -> None:
        self._counts[message, why if isinstance(why, str) else type(why).__name__] += 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "kvmesh_messages_refused", "Messages of the mesh that were refused.", labels=["message", "reason"]
        )
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family
