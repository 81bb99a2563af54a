"""Metrics whose values are read when the page is requested."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Family = GaugeMetricFamily | CounterMetricFamily
ByLabel = Mapping[tuple[str, ...], float]


class OnDemand(Collector):
    """`value` returns a number, or numbers by the values of `labels`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: list[Callable[[], Family]] = []
        registry.register(self)

    def gauge(self, name: str, text: str, value: Callable[[], float | ByLabel], labels: Sequence[str] = ()) -> None:
        self._families.append(lambda: _filled(GaugeMetricFamily(name, text, labels=labels), value()))

    def counter(self, name: str, text: str, value: Callable[[], float | ByLabel], labels: Sequence[str] = ()) -> None:
        """`name`: without `_total`."""
        self._families.append(lambda: _filled(CounterMetricFamily(name, text, labels=labels), value()))

    def collect(self) -> Iterator[Family]:
        """The families with a value; a role without a family's source has none."""
        return (shown for family in self._families if (shown := family()).samples)


def _filled(family: Family, value: float | ByLabel) -> Family:
    for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
        family.add_metric(labels, float(number))
    return family
