"""Our client's headers are those of nats-py's own parser."""

import pytest
from nats.aio.client import Client

from components.messaging.secure_client import ANYONE, SecureClient

TRACEPARENT = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        None,
        b"NATS/1.0\r\n" + TRACEPARENT + b"\r\n",
        b"NATS/1.0\r\ntraceparent: \r\n\r\n",
        b"NATS/1.0\r\ntraceparent: ab\xff\r\n\r\n",
        b"NATS/1.0\r\n" + TRACEPARENT + b"tracestate: a=1\r\n\r\n",
        b"NATS/1.0\r\ntracestate: a=1\r\n" + TRACEPARENT + b"\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 100\r\n" + TRACEPARENT + b"\r\n",
    ],
    ids=["none", "traceparent", "empty", "not ASCII", "with more after it", "with more before it", "status", "both"],
)
async def test_headers_are_read_as_nats_py_reads_them(headers: bytes | None) -> None:
    assert await SecureClient("nats://127.0.0.1:4222", ANYONE)._process_headers(
        headers
    ) == await Client()._process_headers(headers)
