"""What this process refuses of the mesh's messages, counted by where it came in and why."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from components.errors import MeshError

# reasons beside the class names of errors
BAD_TRACEPARENT: Final = "BadTraceparent"  # the message is taken, and may begin a trace of its own
DUPLICATE: Final = "Duplicate"
GAP: Final = "Gap"
STRANGER: Final = "Stranger"  # a sender that is not registered, or not in this epoch, or not the stream's


class Refusals(Collector):
    """`messages_refused_total{message, reason}`: names of our own calls, and of errors; nothing of a message's content."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, message: str, why: MeshError | str) -> None:
        """One message that came as `message`."""
        self._counts[message, why if isinstance(why, str) else type(why).__name__] += 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The metric as Prometheus reads it."""
        family = CounterMetricFamily(
            "messages_refused", "Messages of the mesh that were refused.", labels=["message", "reason"]
        )
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family
