"""How often streams and requests moved to another decode instance, and what that cost."""

from collections import Counter

from prometheus_client import CollectorRegistry

from components.errors import MeshError
from components.telemetry.on_demand import OnDemand


class Moves:
    def __init__(self) -> None:
        self._streams: Counter[str] = Counter()  # by class of the error
        self._requests: Counter[str] = Counter()
        self._tokens = 0

    def count_stream(self, why: MeshError) -> None:
        """Count a stream that had been accepted."""
        self._streams[type(why).__name__] += 1

    def count_request(self, why: MeshError) -> None:
        """Count a request that an instance did not accept."""
        self._requests[type(why).__name__] += 1

    def computed_again(self, tokens: int) -> None:
        """Count a moved stream's prompt and the tokens that it had."""
        self._tokens += tokens

    def show(self, metrics: CollectorRegistry) -> None:
        shown = OnDemand(metrics)
        shown.counter(
            "kvmesh_streams_moved",
            "Streams that moved to another decode instance, by the error of the instance that they left.",
            lambda: _by_reason(self._streams),
            ["reason"],
        )
        shown.counter(
            "kvmesh_requests_retried",
            "Requests sent to another decode instance because one did not accept them, by its error.",
            lambda: _by_reason(self._requests),
            ["reason"],
        )
        shown.counter(
            "kvmesh_tokens_computed_again",
            "Tokens of moved streams that another instance had to compute again, unless it had them cached.",
            lambda: self._tokens,
        )


def _by_reason(counts: Counter[str]) -> dict[tuple[str, ...], float]:
    """Counts by label, with a zero for the usual reason, so that a rate can be taken from the start."""
    return {(reason,): float(count) for reason, count in {"DecodeLost": 0, **counts}.items()}
