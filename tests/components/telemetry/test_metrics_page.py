"""A process serves its metrics at an address of its own."""

import socket

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import choose_encoder

from components.startup import CannotServe
from components.telemetry.metrics_page import metrics_response, serve_metrics
from tests.loop_gap import MAX_GAP_S, longest_gap

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("host", "error"),
    [
        (
            "127.0.0.1",
            "Address already in use; stop the process that uses the address, or choose another with --metrics-port",
        ),
        ("192.0.2.1", "give --metrics-host one that it has, or 0.0.0.0 for all"),
        ("a..b", "'a..b' is not an address or name of this machine; give another --metrics-host"),
    ],
)
async def test_an_unusable_address_is_reported_with_the_options_of_this_page(host: str, error: str) -> None:
    """The error named --host and --port, which are not options of this server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotServe) as caught:
            async with serve_metrics(CollectorRegistry(), host, taken.getsockname()[1], lambda: True):
                pass
    assert caught.value.message.endswith(error)


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_a_page_of_many_series_does_not_block_the_event_loop(accept: str) -> None:
    """Writing it blocked the event loop: 0.1 s for 20 adapters, or for 1,000 API keys."""
    registry = CollectorRegistry()
    for number in range(20):
        histogram = Histogram(f"h{number}_seconds", "Text.", ["model"], registry=registry)
        for model in range(100):
            histogram.labels(f"model-{model}").observe(1)
    async with longest_gap() as gap:
        response = await metrics_response(registry, accept)
    encode, media_type = choose_encoder(accept)
    assert response.body == encode(registry)
    assert response.headers["content-type"] == media_type
    assert gap[0] < MAX_GAP_S, gap
