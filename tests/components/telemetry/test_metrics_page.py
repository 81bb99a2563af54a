"""A process serves its metrics at an address of its own."""

import socket

import pytest
from prometheus_client import CollectorRegistry

from components.startup import CannotServe
from components.telemetry.metrics_page import serve_metrics

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (
            "127.0.0.1",
            "Address already in use; stop the process that uses the address, or choose another with --metrics-port",
        ),
        ("192.0.2.1", "give --metrics-host one that it has, or 0.0.0.0 for all"),
        ("a..b", "'a..b' is not an address or name of this machine; give another --metrics-host"),
    ],
)
async def test_an_address_that_cannot_be_used_is_told_by_the_options_of_this_page(host: str, said: str) -> None:
    """The error named --host and --port, which are options of another server, or of none."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotServe) as caught:
            async with serve_metrics(CollectorRegistry(), host, taken.getsockname()[1], lambda: True):
                pass
    assert caught.value.message.endswith(said)
